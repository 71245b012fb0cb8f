"""A small speculative engine in numpy, right unless it is told to have one of the known faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider import SamplingParams
from outrider.certify.model.book import Book
from outrider.certify.model.subject import Made, Prompts, Subject
from tests.engine.control_laws import Table

VOCAB, END, DEPTH = 24, 3, 3
Row = NDArray[np.float64]


def models(seed: int = 0) -> tuple[Row, Row]:
    """Logits of the next token after each token: the target's, and a draft model's guess."""
    rng = np.random.default_rng(seed)
    target_VV = rng.normal(0, 1.6, (VOCAB, VOCAB))
    # An end of text now and then, and large logits, which bfloat16 keeps three digits of.
    target_VV[:, END] = target_VV.max(1) - 2.0
    return target_VV + 30.0, target_VV + rng.normal(0, 0.9, (VOCAB, VOCAB)) + 30.0


@dataclass(frozen=True)
class Engine:
    """Continues token ids, with `fault` or without."""

    target_VV: Row
    draft_VV: Row
    fault: str | None = None
    depth: int = DEPTH
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """What an engine draws from that ignores seeds: chance of its own, the same in every test."""

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[Made]:
        made: list[Made] = []
        for number, prompt in enumerate(prompts):
            key = [0 if self.fault == "one seed for all" else seed, number]
            rng = self.chance if self.fault == "seed ignored" else np.random.default_rng(key)
            made.append(self._text(list(prompt), params, rng))
        return made

    def _text(self, prompt: list[int], params: SamplingParams, rng: np.random.Generator) -> Made:
        out: list[int] = []
        while len(out) < (params.max_tokens or 16) and END not in out[-1:]:
            left = (params.max_tokens or 16) - len(out) - 1
            kept = self._round(prompt, out, params, rng, min(self.depth, left))
            for i, token in enumerate(kept):
                if token == END and self.fault == "end swallowed" and i + 1 < len(kept):
                    continue
                out.append(token)
                if token == END and self.fault != "end passed over":
                    break
        out = out[: params.max_tokens]
        told = None
        if params.logprobs is not None:
            source = self.draft_VV if self.fault == "logprobs of the draft" else self.target_VV
            rows = [source[last] for last in [prompt[-1], *out[:-1]]]
            told = tuple(
                float(row[token] - np.logaddexp.reduce(row))
                for row, token in zip(rows, out, strict=True)
            )
        return Made(tuple(out), told)

    def _round(
        self,
        prompt: list[int],
        out: list[int],
        params: SamplingParams,
        rng: np.random.Generator,
        depth: int,
    ) -> list[int]:
        path: list[int] = []
        scored: list[Row] = []
        for _ in range(depth):
            row = self.draft_VV[(prompt + out + path)[-1]]
            law = law_of(row, out + path, params)
            drawn = tested = law
            if self.fault == "raw law of a truncated draft":
                tested = law_of(row, out + path, SamplingParams(temperature=params.temperature))
            if self.fault == "likeliest token drafted":
                drawn = np.eye(VOCAB)[law.argmax()]
            if self.fault == "draft in bfloat16":
                rough = torch.tensor(row).bfloat16().double().numpy()
                drawn = law_of(rough, out + path, params)
            path.append(draw(drawn, rng.random()))
            scored.append(tested)
        rows = [self._due(prompt, out, path[:i], params) for i in range(depth + 1)]
        for i, (token, q) in enumerate(zip(path, scored, strict=True)):
            p = rows[max(0, i - 1)] if self.fault == "row before" else rows[i]
            point = rng.random()
            if point * q[token] < p[token]:
                continue
            rest = p if self.fault == "redrawn from the target" else np.maximum(p - q, 0)
            again = point if self.fault == "noise used twice" else rng.random()
            return [*path[:i], draw(rest if rest.sum() > 0 else p, again)]
        bonus = rows[max(0, depth - 1)] if self.fault == "bonus from the row before" else rows[-1]
        return [*path, draw(bonus, rng.random())]

    def _due(
        self, prompt: list[int], out: list[int], path: list[int], params: SamplingParams
    ) -> Row:
        row = self.target_VV[(prompt + out + path)[-1]]
        seen = out if self.fault == "penalties once a round" else out + path
        ignored = {
            "min_p ignored": {"min_p": 0.0},
            "temperature ignored": {"temperature": 1.0},
        }.get(self.fault or "", {})
        return law_of(row, seen, params, **ignored)


def law_of(row: Row, seen: Sequence[int], params: SamplingParams, **other: float) -> Row:
    """Penalties, temperature, top_k and min_p."""
    row = row.copy()
    for token in seen:
        row[token] -= params.frequency_penalty
    for token in set(seen):
        row[token] -= params.presence_penalty
    heat = other.get("temperature", params.temperature)
    if params.temperature == 0:
        return np.eye(VOCAB)[row.argmax()]
    law = np.exp((row - row.max()) / heat)
    if params.top_k:
        law[law < np.sort(law)[-params.top_k]] = 0
    law[law < other.get("min_p", params.min_p) * law.max()] = 0
    return law / law.sum()


def draw(law: Row, point: float) -> int:
    """Inverse cdf."""
    upto = law.cumsum()
    return int(min((upto > point * upto[-1]).argmax(), VOCAB - 1))


def subject(fault: str | None = None, *, rounded: bool = False) -> Subject:
    """The engine with its books."""
    target_VV, draft_VV = models()
    own_VV = torch.tensor(target_VV).bfloat16().double().numpy() if rounded else target_VV
    target, draft = (Table(torch.tensor(one)) for one in (target_VV, draft_VV))
    return Subject(
        name=f"numpy engine, {fault}",
        generate=Engine(own_VV, draft_VV, fault),
        target=Book(target, (END,)),
        plain=Engine(own_VV, draft_VV, depth=0),
        draft=Book(draft),
    )


PARAMS = SamplingParams(
    temperature=0.8, top_k=12, min_p=0.02, frequency_penalty=0.8, presence_penalty=0.4
)
FAULTS = {
    "raw law of a truncated draft": "rule bias",
    "likeliest token drafted": "rule bias",
    "penalties once a round": "control ignored",
    "min_p ignored": "control ignored",
    "temperature ignored": "control ignored",
    "noise used twice": "rule bias",
    "end swallowed": "rule bias",
    "end passed over": "rule bias",
    "bonus from the row before": "rule bias",
    "row before": "rule bias",
    "redrawn from the target": "rule bias",
    "seed ignored": "seed ignored",
    "one seed for all": "seed ignored",
    "logprobs of the draft": "control ignored",
    "draft in bfloat16": "numeric drift",
}
"""Planted faults and the verdict each must get."""
