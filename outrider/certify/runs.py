"""Whole texts written by the production rules on tabular pairs, many seeds at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider import noise
from outrider.certify import pairs, reference
from outrider.certify.enumerate import Text, target_law
from outrider.certify.pairs import Pair
from outrider.decoding import (
    RULES,
    Draft,
    Draws,
    Law,
    RoundNoise,
    Rule,
    TargetLaws,
    TargetRows,
    Verdict,
    theory,
)
from outrider.decoding.rules.base import while_equal
from outrider.decoding.rules.coupled import CoupledRule
from outrider.decoding.rules.greedy import GreedyRule
from outrider.decoding.sampling import gumbel_race
from outrider.decoding.theory import LawRow, Model


@dataclass(frozen=True, slots=True)
class Written:
    """Texts, one per seed, with drafted tokens kept and tested over all rounds."""

    texts: list[Text]
    kept: int
    drafted: int
    tested: int


def write(
    rule: Rule | str, p: Model, q: Model, seeds: Sequence[int], depth: int, length: int
) -> Written:
    """Writes a text of `length` tokens per seed in rounds of up to `depth` drafted tokens."""
    rule = RULES[rule] if isinstance(rule, str) else rule
    key = noise.as_key(seeds)
    texts: list[Text] = [() for _ in seeds]
    kept = drafted = tested = 0
    while open_ := [b for b, text in enumerate(texts) if len(text) < length]:
        here = [texts[b] for b in open_]
        anchors = torch.tensor([len(text) for text in here])
        round_noise = RoundNoise(key[open_], torch.zeros_like(anchors), anchors)
        depths = [min(depth, length - len(text) - 1) for text in here]
        draft = _draft(rule, q, here, depths, round_noise)
        chains = [row[:n] for row, n in zip(draft.tree.tokens_BN.tolist(), depths, strict=True)]
        verdict = rule.verify(draft, TargetLaws(_target_rows(p, here, chains)), round_noise)
        decided = zip(
            open_, chains, verdict.num_accepted_B.tolist(), verdict.token_B.tolist(), strict=True
        )
        for b, chain, n, token in decided:
            texts[b] += (*chain[:n], token)
            kept += n
            drafted += len(chain)
            tested += min(n + 1, len(chain))
    return Written(texts, kept, drafted, tested)


def _draft(
    rule: Rule, q: Model, texts: list[Text], depths: list[int], round_noise: RoundNoise
) -> Draft:
    """Chains of `depths[b]` tokens, drawn where the engine draws them."""
    width, deepest = len(q(())), max(depths)
    draws = Draws(rule, round_noise)
    tokens = torch.zeros(len(texts), deepest, dtype=torch.int64)
    laws = torch.zeros(len(texts), deepest, width, dtype=torch.float64)
    grown = list(texts)
    for i in range(deepest):
        going = torch.tensor([b for b, depth in enumerate(depths) if depth > i])
        law = torch.tensor([_floats(q, grown[b]) for b in going.tolist()], dtype=torch.float64)
        tokens[going, i] = draws.draw(Law.dense(law), i, going)
        laws[going, i] = law
        for b in going.tolist():
            grown[b] = (*grown[b], int(tokens[b, i]))
    law = Law.dense(laws.view(-1, width)) if deepest else None
    return Draft.chain(tokens, torch.tensor(depths), law)


def _target_rows(p: Model, texts: list[Text], chains: list[list[int]]) -> Tensor:
    most = max(len(chain) for chain in chains) + 1
    rows = torch.zeros(len(texts), most, len(p(())), dtype=torch.float64)
    for b, (text, chain) in enumerate(zip(texts, chains, strict=True)):
        for i in range(len(chain) + 1):
            rows[b, i] = torch.tensor(_floats(p, (*text, *chain[:i])), dtype=torch.float64)
    return rows


def _floats(model: Model, prefix: Text) -> list[float]:
    return [float(x) for x in model(prefix)]


def plain_seeded(p: Model, seed: int, length: int) -> Text:
    """Plain sampling with a seed, written out: the race at each token's own position."""
    text: Text = ()
    for position in range(length):
        law = p(text)
        uniform = noise.uniforms53(
            seed, 0, noise.STREAM_TARGET, position, torch.arange(len(law))
        ).tolist()
        gumbels = [-math.log(-math.log(u)) for u in uniform]
        text += (reference.race(law, math.log, gumbels),)
    return text


def plain_greedy(p: Model, length: int) -> Text:
    """Plain greedy decoding, written out."""
    text: Text = ()
    for _ in range(length):
        text += (reference.argmax(p(text)),)
    return text


def surprise(texts: Sequence[Text], p: Model, length: int) -> float:
    """How many standard deviations the chi-square of texts against the target's law is too large.

    Wilson and Hilferty's cube root; cells expecting fewer than 5 texts are put together; a text
    the target forbids is infinitely surprising.
    """
    counts = Counter(text[:length] for text in texts)
    cells: list[tuple[int, float]] = []
    rest_seen, rest_expected = 0, 0.0
    for text, mass in target_law(p, length).items():
        seen, expected = counts.pop(text, 0), float(mass) * len(texts)
        if expected < 5:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
        else:
            cells.append((seen, expected))
    if counts:
        return math.inf
    if rest_expected >= 5:
        cells.append((rest_seen, rest_expected))
    free = max(len(cells) - 1, 1)
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    spread = 2 / (9 * free)
    return ((statistic / free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def seeded_checks(num_texts: int) -> Iterator[tuple[str, bool]]:
    """Facts about the seeded rules on random pairs, each a line and whether it holds."""
    for rule in ("coupled", "greedy"):
        total = differing = kept = 0
        for pair in _pairs():
            for drafter in (pair.draft, pair.target, _uniform_over(pair.vocab_size)):
                seeds = range(1000 * total, 1000 * total + num_texts)
                written = write(rule, pair.target, drafter, seeds, 3, LENGTH)
                plain = [_plain(rule, pair.target, seed) for seed in seeds]
                differing += sum(a != b for a, b in zip(written.texts, plain, strict=True))
                total += num_texts
                kept += written.kept
        line = (
            f"{rule}: {total:,} texts of {LENGTH} tokens over three drafters each, {kept:,} "
            f"drafted tokens kept; {differing} differ from plain decoding"
        )
        yield line, differing == 0
    for pair in _pairs():
        p, q = pair.target(()), pair.draft(())
        written = write("coupled", _always(p), _always(q), range(10 * num_texts), 1, 2)
        expected = float(theory.gumbel_acceptance(p, q))
        seen, spread = (
            written.kept / written.drafted,
            math.sqrt(max(expected * (1 - expected), 1e-9)),
        )
        off = (seen - expected) / (spread / math.sqrt(written.drafted))
        line = (
            f"coupled, {pair.name}: {seen:.4f} of {written.drafted:,} drafted tokens kept, closed "
            f"form {expected:.4f} ({off:+.1f} standard errors)"
        )
        yield line, abs(off) < 4.5


def seeded_wrong(num_texts: int) -> Iterator[tuple[str, str, bool]]:
    """Broken seeded rules: name, how many texts differ from plain decoding, whether any does."""
    for broken in (
        _KeyedByRound(),
        _KeyedByNode(),
        _KeyedByDraftLength(),
        _LastOfEquals(),
        _KeepsOneMore(),
        _Lenient(),
    ):
        differing = total = 0
        for pair in _pairs():
            seeds = range(total, total + num_texts)
            written = write(broken, pair.target, pair.draft, seeds, 3, LENGTH)
            plain = [_plain(broken.name, pair.target, seed) for seed in seeds]
            differing += sum(a != b for a, b in zip(written.texts, plain, strict=True))
            total += num_texts
        name = f"{broken.name}: {str(broken.__doc__).rstrip('.')}"
        yield name, f"{differing:,} of {total:,} texts", differing > 0


LENGTH = 6


def _pairs() -> list[Pair]:
    """A few pairs on which seeded rules are run; the last has ties between the likeliest."""
    return [pairs.random_pair(seed) for seed in (1, 2, 4)] + [
        pairs.fixed("two likeliest", [2, 2, 1], [1, 2, 2], depth=3, length=LENGTH)
    ]


def _uniform_over(vocab_size: int) -> Model:
    return _always(pairs.fractions_of([1] * vocab_size))


def _always(law: LawRow) -> Model:
    return lambda _: law


def _plain(rule: str, p: Model, seed: int) -> Text:
    return plain_greedy(p, LENGTH) if rule == "greedy" else plain_seeded(p, seed, LENGTH)


class _Shifted(CoupledRule, ABC):
    """Coupled with the noise of row i moved by `shift`."""

    @abstractmethod
    def shift(self, draft: Draft, noise: RoundNoise, row: int) -> Tensor:
        """What is added to the anchor of row `row`, besides nothing."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Row by row at the shifted anchors."""
        target_BTV = _whole(target)
        rows = [
            gumbel_race(
                target_BTV[:, i].masked_fill((i > draft.tree.counts_B)[:, None], 0),
                None,
                noise.seed_B,
                noise.sample_B,
                noise.anchor_B + self.shift(draft, noise, i),
            )
            for i in range(target_BTV.shape[1])
        ]
        return while_equal(draft, torch.stack(rows, 1))


class _KeyedByRound(_Shifted):
    """noise of every row keyed by the round's anchor."""

    def shift(self, draft: Draft, noise: RoundNoise, row: int) -> Tensor:
        return torch.zeros_like(noise.anchor_B)


class _KeyedByNode(_Shifted):
    """noise keyed by the node's index in the round, not by position."""

    def shift(self, draft: Draft, noise: RoundNoise, row: int) -> Tensor:
        return row - noise.anchor_B


class _KeyedByDraftLength(_Shifted):
    """noise keyed by the end of the draft."""

    def shift(self, draft: Draft, noise: RoundNoise, row: int) -> Tensor:
        return draft.tree.counts_B - row


class _LastOfEquals(GreedyRule):
    """the highest id of several likeliest tokens."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        target_BTV = _whole(target)
        last = target_BTV.shape[2] - 1
        return while_equal(draft, last - target_BTV.flip(-1).argmax(-1))


class _KeepsOneMore(GreedyRule):
    """one drafted token more than agrees is kept."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        right = super().verify(draft, target, noise)
        kept = torch.minimum(right.num_accepted_B + 1, draft.tree.counts_B)
        own = _whole(target).argmax(-1)
        token_B = own.gather(1, kept[:, None]).squeeze(1)
        return Verdict.of_chain(kept, token_B, draft.tree.num_nodes)


class _Lenient(GreedyRule):
    """a drafted token half as likely as the likeliest is kept."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        target_BTV = _whole(target)
        own, depth = target_BTV.argmax(-1), draft.tree.num_nodes
        chosen = target_BTV[:, :depth].gather(2, draft.tree.tokens_BN[:, :, None]).squeeze(2)
        near = chosen * 2 >= target_BTV[:, :depth].amax(-1)
        own[:, :depth] = torch.where(near, draft.tree.tokens_BN, own[:, :depth])
        return while_equal(draft, own)


def _whole(target: TargetRows) -> Tensor:
    """The table `[B, T, V]`."""
    num_texts, num_rows, width = target.shape
    return target.probs(torch.arange(num_texts * num_rows)).view(num_texts, num_rows, width)
