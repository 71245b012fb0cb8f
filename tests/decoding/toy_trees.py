"""Random token trees whose laws are functions of the text before, drawn at the real addresses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider import host, noise
from outrider.certify import reference
from outrider.certify.reference_trees import DraftedTree, TreeRound
from outrider.decoding import Draft, Kind, Law, RoundNoise, TargetLaws
from outrider.tree import TokenTree

Text = tuple[int, ...]


def noise_of(num_texts: int, seed: int = 0, anchor: int = 5) -> RoundNoise:
    seeds = range(seed * 2**40, seed * 2**40 + num_texts)
    zeros = torch.zeros(num_texts, dtype=torch.int64)
    return RoundNoise(noise.as_key(seeds), zeros, torch.full((num_texts,), anchor))


def paths_shape(count: int, depth: int) -> tuple[int, ...]:
    """Parents of `count` paths from the root, one after the other."""
    return tuple(0 if d == 0 else k * depth + d for k in range(count) for d in range(depth))


class Model:
    """Laws after every prefix, made up when first asked for: whole weights with zeros, or reals."""

    def __init__(self, seed: int, width: int) -> None:
        self._seed = seed
        self._width = width
        self._laws: dict[Text, Tensor] = {}

    def __call__(self, text: Text) -> Tensor:
        if text not in self._laws:
            chance = random.Random(f"{self._seed} {text}")
            weights = [float(chance.randrange(4)) for _ in range(self._width)]
            weights[chance.randrange(self._width)] += 1
            if chance.random() < 0.5:
                weights = [chance.random() ** 3 + 1e-3 for _ in weights]
            law = torch.tensor(weights, dtype=torch.float64)
            self._laws[text] = law / law.sum()
        return self._laws[text]


@dataclass(frozen=True, slots=True)
class Case:
    """Drafted trees beside everything their rule reads."""

    draft: Draft
    target_BTV: Tensor
    q_BNV: Tensor
    noise: RoundNoise
    shapes: Sequence[Sequence[int]]

    @property
    def target(self) -> TargetLaws:
        return TargetLaws(self.target_BTV)

    def rounds(self) -> Iterator[TreeRound]:
        """The same rounds for the reference."""
        chance, (num_texts, num_nodes) = self.noise, self.draft.tree.tokens_BN.shape
        address = chance.seed_B[:, None], chance.sample_B[:, None]
        index, anchor = torch.arange(num_nodes + 1), chance.anchor_B[:, None]
        tests = noise.uniforms(*address, noise.STREAM_ACCEPT, anchor, index).tolist()
        extra = noise.uniforms53(*address, noise.STREAM_EXTRA, anchor, index).tolist()
        for b in range(num_texts):
            count = len(self.shapes[b])
            tree = DraftedTree(
                self.draft.tree.tokens_BN[b, :count].tolist(),
                self.shapes[b],
                self.q_BNV[b, :count].tolist(),
                [Kind.IID] * count,
            )
            chance_b = reference.Noise(tests[b].__getitem__, extra[b].__getitem__, _none)
            yield TreeRound(tree, self.target_BTV[b, : count + 1].tolist(), chance_b)


def _none(index: int) -> float:
    raise AssertionError(f"uniform {index} of the draft: the draft is given")


def drawn(shapes: Sequence[Sequence[int]], width: int, seed: int, kind: Kind = Kind.IID) -> Case:
    """One tree per shape, children drawn IID or (POINT) the likeliest of the draft's law."""
    num_texts, num_nodes = len(shapes), max(map(len, shapes))
    target, draft = Model(2 * seed, width), Model(2 * seed + 1, width)
    chance = noise_of(num_texts, seed)
    uniforms = noise.uniforms53(
        chance.seed_B[:, None],
        chance.sample_B[:, None],
        noise.STREAM_DRAFT,
        chance.anchor_B[:, None],
        torch.arange(num_nodes),
    ).tolist()
    tokens: list[list[int]] = []
    target_BTV = torch.zeros(num_texts, num_nodes + 1, width, dtype=torch.float64)
    q_BNV = torch.zeros(num_texts, num_nodes, width, dtype=torch.float64)
    rows = torch.zeros(num_texts, num_nodes, dtype=torch.int64)
    for b, shape in enumerate(shapes):
        texts: list[Text] = [()]
        target_BTV[b, 0] = target(())
        for j, parent in enumerate(shape):
            q = draft(texts[parent])
            if kind == Kind.POINT:
                token = int(q.argsort(descending=True, stable=True)[list(shape[:j]).count(parent)])
            else:
                token = reference.inverse_cdf(q.tolist(), uniforms[b][j])
            texts.append((*texts[parent], token))
            q_BNV[b, j], target_BTV[b, j + 1] = q, target(texts[-1])
            rows[b, j] = b * num_nodes + list(shape).index(parent)
        tokens.append([text[-1] for text in texts[1:]])
    law = Law.dense(q_BNV.flatten(0, 1))
    tree = TokenTree.of(tokens, shapes)
    return Case(Draft(tree, law, rows, None, frozenset({kind})), target_BTV, q_BNV, chance, shapes)


class Watched(TargetLaws):
    """Laws that remember which flat rows were asked for."""

    def __init__(self, probs_BTV: Tensor) -> None:
        super().__init__(probs_BTV)
        self.asked: list[int] = []

    def probs(self, at_n: Tensor) -> Tensor:
        self.asked += at_n.tolist()
        return super().probs(at_n)

    def row(self, at: int) -> tuple[Tensor, float]:
        self.asked.append(at)
        return super().row(at)

    def argmax(self, at_n: Tensor) -> Tensor:
        self.asked += at_n.tolist()
        return super().argmax(at_n)


@contextmanager
def nobody_left_out() -> Iterator[None]:
    """The way taken on accelerators, on the CPU."""
    before = host.reads_free
    host.reads_free = lambda device: False
    try:
        yield
    finally:
        host.reads_free = before
