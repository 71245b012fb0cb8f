"""Production against reference, path by path: same tables, same Philox noise, same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider import noise
from outrider.certify import reference
from outrider.certify.reference import IN_LAW, Noise, Outcome, Round
from outrider.decoding import RULES, Draft, Draws, Law, RoundNoise, Rule, TargetLaws
from outrider.decoding.theory import LawRow, Number

MARGIN = 1e-6
"""How close to a decision float32 may decide otherwise."""
FORMS = ("dense", "sparse", "point")
ON_CHAINS = {
    "recursive": "token",
    "hybrid": "token",
    "kseq": "token",
    "traversal": "block",
    "hybrid-traversal": "block",
    "gbv": "block",
}
"""What rules for trees are where every row has one child."""


@dataclass(slots=True)
class PathCount:
    """Rounds compared, uniforms they read, and differences.

    `excused` differences lie within MARGIN of a decision in the reference; `wrong` do not.
    """

    rule: str
    rounds: int = 0
    draws: int = 0
    excused: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list[str])

    def add(self, other: PathCount) -> None:
        """Adds another count of the same rule."""
        self.rounds += other.rounds
        self.draws += other.draws
        self.excused += other.excused
        self.wrong += other.wrong
        self.examples += other.examples


@dataclass(frozen=True, slots=True)
class _Batch:
    """B random rounds: tables in float64, lengths, noise."""

    p_BTV: NDArray[np.float64]
    q_BKV: NDArray[np.float64]
    lengths_B: Tensor
    noise: RoundNoise


def compare(
    rule: str,
    seed: int,
    rounds: int,
    form: str,
    dtype: torch.dtype,
    production: Rule | None = None,
) -> PathCount:
    """Runs `rounds` random rounds through production and through the reference.

    Tables are of 2 to 6 tokens at depth 0 to 3: small whole-number weights with zeros and equal
    laws, and random reals. Production reads them in `dtype`, the reference in float64.

    Args:
        rule: name of the rule.
        seed: of tables, lengths and noise addresses.
        rounds: how many.
        form: how the draft's law is handed over: `dense`, `sparse`, or `point` (certain tokens).
        dtype: float64 or float32.
        production: what is compared with the reference of `rule`; None = the rule itself.
    """
    production = production or RULES[rule]
    count, rule = PathCount(rule), ON_CHAINS.get(rule, rule)
    batch = _batch(seed, rounds)
    depth, width = batch.q_BKV.shape[1:]
    p_BTV = torch.from_numpy(batch.p_BTV).to(dtype)
    law = _law(batch, form, dtype)
    draws = Draws(production, batch.noise)
    everyone = torch.arange(rounds)
    columns = [draws.draw(law.select(everyone * depth + i), i, everyone) for i in range(depth)]
    tokens_BK = torch.stack(columns, 1) if columns else torch.zeros(rounds, 0, dtype=torch.int64)
    handed = None if form == "point" else law
    draft = Draft.chain(tokens_BK, batch.lengths_B, handed)
    verdict = production.verify(draft, TargetLaws(p_BTV), batch.noise)
    q_BKV = (
        law.table(width).reshape(rounds, depth, width).numpy() if form == "point" else batch.q_BKV
    )
    decided = torch.stack((verdict.num_accepted_B, verdict.token_B), 1).tolist()
    readings = _Readings(rule, batch, width)
    for b, (length, tokens, got) in enumerate(
        zip(batch.lengths_B.tolist(), tokens_BK.tolist(), decided, strict=True)
    ):
        case = Round(
            tokens[:length],
            batch.p_BTV[b, : length + 1].tolist(),
            q_BKV[b, :length].tolist(),
            readings.noise(b),
        )
        count.rounds += 1
        count.draws += readings.draws_of(length)
        same = _drafts_agree(rule, case, form, readings, b)
        outcome = _decide(rule, case, readings, b)
        if same and [outcome.kept, outcome.token] == got:
            continue
        _judge(count, rule, case, readings, b, got)
    return count


def _judge(
    count: PathCount, rule: str, round: Round, readings: _Readings, b: int, got: list[int]
) -> None:
    margin = readings.margin(rule, round, b)
    if margin < MARGIN:
        count.excused += 1
        return
    count.wrong += 1
    if len(count.examples) < 3:
        count.examples.append(f"{count.rule}: {round} gave {got}, margin {margin:.1e}")


class _Readings:
    """The round's noise as Python numbers, read once for the whole batch."""

    def __init__(self, rule: str, batch: _Batch, width: int) -> None:
        depth = batch.q_BKV.shape[1]
        key, sample, anchor = batch.noise.seed_B, batch.noise.sample_B, batch.noise.anchor_B
        address = key[:, None], sample[:, None]
        index = torch.arange(depth + 1)
        place = anchor[:, None]
        self._rule = rule
        self._width = width
        self._gumbels: list[list[list[float]]] = []
        self._tests: list[list[float]] = []
        if rule == "coupled":
            position = (place + index)[:, :, None]
            ids = torch.arange(width)
            field_ = noise.gumbels(key[:, None, None], sample[:, None, None], position, ids)
            self._gumbels = field_.tolist()
        elif rule != "greedy":
            self._tests = noise.uniforms(*address, noise.STREAM_ACCEPT, place, index).tolist()
            self._extra = noise.uniforms53(*address, noise.STREAM_EXTRA, place, index).tolist()
            self._draft = noise.uniforms53(*address, noise.STREAM_DRAFT, place, index).tolist()

    def noise(self, b: int) -> Noise:
        """The uniforms of round b."""
        if not self._tests:
            return Noise(*[_nothing] * 3)
        return Noise(*(part[b].__getitem__ for part in (self._tests, self._extra, self._draft)))

    def gumbels(self, b: int, i: int) -> list[float]:
        """Noise of all tokens at the i-th position of round b."""
        return self._gumbels[b][i]

    def draws_of(self, length: int) -> int:
        """Uniforms a round of `length` drafted tokens may read."""
        if self._rule == "coupled":
            return (length + 1) * self._width
        return 0 if self._rule == "greedy" else 2 * length + 1

    def margin(self, rule: str, round: Round, b: int) -> float:
        """The least distance of a decision of the reference from its threshold."""
        if rule not in IN_LAW:
            return _order_margin(rule, round, self, b)
        met: list[float] = []
        plain = round.noise
        watched = Noise(
            *(
                lambda i, read=read: Watched(read(i), met)
                for read in (plain.test, plain.extra, plain.draft)
            )
        )
        IN_LAW[rule](Round(round.tokens, round.target, round.draft, watched))
        for i, law in enumerate(round.draft):
            reference.inverse_cdf(law, watched.draft(i))
        return min(met, default=math.inf)


@dataclass(frozen=True, slots=True)
class Watched:
    """A number that remembers how close its comparisons were."""

    value: float
    met: list[float]
    scale: float = 1.0

    def __mul__(self, factor: Number) -> Watched:
        return Watched(self.value * float(factor), self.met, self.scale * float(factor))

    def __lt__(self, bound: Number) -> bool:
        gap = abs(self.value - float(bound))
        # Of a uniform times a mass: how far the uniform is from deciding otherwise.
        self.met.append(gap / self.scale if 0 < self.scale < 1 else gap)
        return self.value < bound


def _nothing(index: int) -> float:
    raise AssertionError(f"uniform {index}: this rule reads none")


def _log(mass: Number) -> float:
    return math.log(mass)


def _decide(rule: str, round: Round, readings: _Readings, b: int) -> Outcome:
    if rule in IN_LAW:
        return IN_LAW[rule](round)
    if rule == "greedy":
        own = [reference.argmax(p) for p in round.target]
    else:
        own = [reference.race(p, _log, readings.gumbels(b, i)) for i, p in enumerate(round.target)]
    return reference.while_equal(round.tokens, own)


def _drafts_agree(rule: str, round: Round, form: str, readings: _Readings, b: int) -> bool:
    """Whether the reference draws the same drafted tokens."""
    if form == "point":
        return True
    for i, (x, q) in enumerate(zip(round.tokens, round.draft, strict=True)):
        if rule == "greedy":
            drawn = reference.argmax(q)
        elif rule == "coupled":
            drawn = reference.race(q, _log, readings.gumbels(b, i))
        else:
            drawn = reference.inverse_cdf(q, round.noise.draft(i))
        if drawn != x:
            return False
    return True


def _order_margin(rule: str, round: Round, readings: _Readings, b: int) -> float:
    """Least gap between first and second of any row that greedy or coupled orders."""

    def gap(i: int, row: LawRow) -> float:
        if rule == "greedy":
            scores = sorted(map(float, row))
        else:
            gumbels = readings.gumbels(b, i)
            scores = sorted(_log(x) + g for x, g in zip(row, gumbels, strict=True) if x > 0)
        return scores[-1] - scores[-2] if len(scores) > 1 else math.inf

    rows = [*enumerate(round.target), *enumerate(round.draft)]
    return min(gap(i, row) for i, row in rows)


def _batch(seed: int, rounds: int) -> _Batch:
    chance = np.random.default_rng(seed)
    width, depth = int(chance.integers(2, 7)), int(chance.integers(0, 4))
    if depth == 0 and chance.random() < 0.7:
        depth = 3
    p = law_rows(chance, (rounds, depth + 1, width))
    q = law_rows(chance, (rounds, depth, width))
    equal = chance.random((rounds, depth)) < 0.15
    q[equal] = p[:, :depth][equal]
    near = chance.random((rounds, depth)) < 0.15
    q[near] = (q[near] + 9 * p[:, :depth][near]) / 10
    return _Batch(
        p_BTV=p,
        q_BKV=q,
        lengths_B=torch.from_numpy(chance.integers(0, depth + 1, rounds)),
        noise=RoundNoise(
            seed_B=torch.from_numpy(chance.integers(-(2**63), 2**63, rounds)),
            sample_B=torch.from_numpy(chance.integers(0, 4, rounds)),
            anchor_B=torch.from_numpy(chance.integers(1, 2**20, rounds)),
        ),
    )


def law_rows(chance: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Laws along the last axis: half of small whole numbers with zeros, half of random reals."""
    whole = chance.integers(0, 4, shape).astype(np.float64)
    whole[..., 0] += whole.sum(-1) == 0
    real = chance.random(shape) ** 3 + 1e-3
    mixed = np.where(chance.random(shape[:-1])[..., None] < 0.5, whole, real)
    return mixed / mixed.sum(-1, keepdims=True)


def _law(batch: _Batch, form: str, dtype: torch.dtype) -> Law:
    rounds, depth, width = batch.q_BKV.shape
    table = torch.from_numpy(batch.q_BKV).to(dtype).reshape(rounds * depth, width)
    if form == "point":
        return Law.point(table.argmax(1) if rounds * depth else torch.zeros(0, dtype=torch.int64))
    return as_form(table, form)


def as_form(table_RV: Tensor, form: str) -> Law:
    """A table of laws as it is (`dense`) or as supports (`sparse`)."""
    if form == "dense":
        return Law.dense(table_RV)
    # The support in front, padding of probability 0 behind: ids ascend as in the table.
    ids = (table_RV == 0).to(torch.int8).sort(dim=1, stable=True).indices
    return Law.sparse(ids, table_RV.gather(1, ids))
