"""Time one verification step of every rule beside merely reading the target's logits once.

    python benchmarks/verification.py --json docs/verification.json

Needs an otherwise idle machine, 10 GB of memory and about a quarter of an hour;
`--smoke` needs seconds.
See docs/verification.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from outrider import noise
from outrider.bench.script import command_of, exit_code, ints, others_at_work, parser_of, save
from outrider.decoding import RULES, Draft, Draws, Law, RoundNoise, Rule, TargetLogits, Verdict
from outrider.decoding.grow import grow
from outrider.tree import TokenTree

VOCABS, BATCHES, DEPTHS = (32_768, 128_256, 152_064), (1, 8, 64), (4, 8)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BRANCHES = {16: (4, 3), 64: (4, 3, 4)}
"""Trees by number of nodes: children of the root, of each of those, and so on."""
PATHS = {16: (4, 4), 64: (8, 8)}
"""The same for `gbv`: how many chains, and their depth."""
POOL, SPREAD, NOISE = 16, 3.0, 0.75
"""Different rows, the deviation of target logits, and that of the drafter's error about them."""
CHAIN_RULES = ("greedy", "match", "token", "block", "coupled")
_PATIENCE = 4.0
READ, HF, VLLM = "logsumexp", "transformers", "vllm"


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing timed in one cell.

    Attributes:
        name: a rule, `logsumexp` of all rows, or a peer.
        ms: median of one step.
        ratio: over the logsumexp of all rows, median of the ratios within a round.
        kept: drafted tokens kept, a mean over texts; None where nothing is decided.
        visited: share of the rows that the rule asked for.
        bound: for trees, ms over the logsumexp of the visited rows plus `token` on a chain of the
            kept depth.
    """

    name: str
    ms: float
    ratio: float
    kept: float | None = None
    visited: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: B texts of one shape, and everything timed there, interleaved."""

    vocab: int
    texts: int
    shape: str
    dtype: str
    rounds: int
    subjects: tuple[Subject, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """A few target rows and the drafter's laws beside them; larger tables repeat them."""

    logits_PV: Tensor
    laws_PV: Tensor

    @classmethod
    def random(cls, vocab: int) -> Pool:
        """Normal logits; the drafter sees them with an error."""
        chance = torch.Generator().manual_seed(vocab)
        logits = torch.randn(POOL, vocab, generator=chance) * SPREAD
        error = torch.randn(POOL, vocab, generator=chance) * NOISE
        return cls(logits, torch.softmax(logits + error, -1))

    def alpha(self) -> float:
        """Chance that one token drawn from the drafter's law stays."""
        target = torch.softmax(self.logits_PV, -1)
        return float(torch.minimum(target, self.laws_PV).sum(-1).mean())

    def logits(self, texts: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Row t of text b is row `b * T + t` of the pool, round and round."""
        table = torch.empty(texts * rows, self.logits_PV.shape[1], dtype=dtype)
        for start in range(0, len(table), POOL):
            table[start : start + POOL] = self.logits_PV[: len(table) - start]
        return table.view(texts, rows, -1)

    def laws(self, flat_n: Tensor) -> Law:
        """The drafter's laws after flat rows."""
        return Law.dense(self.laws_PV.index_select(0, flat_n % POOL))


class Watched(TargetLogits):
    """Remembers which rows were asked for."""

    def __init__(self, logits_BTV: Tensor) -> None:
        super().__init__(logits_BTV)
        self.asked: set[int] = set()

    def probs(self, at_n: Tensor) -> Tensor:
        """As before."""
        self.asked.update(at_n.tolist())
        return super().probs(at_n)

    def weighed(self, at_n: Tensor) -> tuple[Tensor, Tensor | None]:
        """As before."""
        self.asked.update(at_n.tolist())
        return super().weighed(at_n)

    def row(self, at: int) -> tuple[Tensor, float]:
        """As before."""
        self.asked.add(at)
        return super().row(at)

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """As before."""
        self.asked.update(at_n.tolist())
        return super().prob_of(at_n, tokens_n)

    def argmax(self, at_n: Tensor) -> Tensor:
        """As before."""
        self.asked.update(at_n.tolist())
        return super().argmax(at_n)


def noise_of(texts: int) -> RoundNoise:
    """Addresses of one round."""
    zero_B = torch.zeros(texts, dtype=torch.int64)
    return RoundNoise(noise.as_key(range(1, texts + 1)), zero_B, zero_B + 100)


def chain(pool: Pool, rule: Rule, texts: int, depth: int) -> Draft:
    """Chains as the rule wants them drawn."""
    everyone, draws = torch.arange(texts), Draws(rule, noise_of(texts))
    flat_BK = everyone[:, None] * (depth + 1) + torch.arange(depth)
    columns = [draws.draw(pool.laws(flat_BK[:, i]), i, everyone) for i in range(depth)]
    law = pool.laws(flat_BK.flatten()) if rule.needs_draft_law else None
    return Draft.chain(torch.stack(columns, 1), torch.full((texts,), depth), law)


def tree(pool: Pool, rule: Rule, texts: int, parents: tuple[int, ...]) -> Draft:
    """Trees as the rule wants them drawn."""

    def expand(_: TokenTree, rows_BL: Tensor) -> Law:
        flat_BL = torch.arange(texts)[:, None] * (len(parents) + 1) + rows_BL
        return pool.laws(flat_BL.flatten())

    return grow(Draws(rule, noise_of(texts)), parents, expand)


def branched(branches: tuple[int, ...]) -> tuple[int, ...]:
    """Parent rows of a tree with so many children on each level."""
    parents: list[int] = []
    level = [0]
    for num in branches:
        first = len(parents) + 1
        parents += [row for row in level for _ in range(num)]
        level = list(range(first, len(parents) + 1))
    return tuple(parents)


def chains(paths: tuple[int, int]) -> tuple[int, ...]:
    """Parent rows of chains side by side, level by level."""
    num, depth = paths
    return tuple(0 if i == 0 else num * (i - 1) + k + 1 for i in range(depth) for k in range(num))


def transformers_step(draft: Draft, logits_BTV: Tensor, pool: Pool) -> Callable[[], object]:
    """transformers' function for one text, called text by text.

    It takes the drafter's logits, not laws, and gets everything in the table's dtype.
    """
    from transformers.generation.utils import _speculative_sampling

    tokens_BK = draft.tree.tokens_BN
    texts, depth = tokens_BK.shape
    assert draft.law is not None
    q_BKV = draft.law.probs.log().to(logits_BTV.dtype).view(texts, depth, -1)

    def step() -> object:
        return [
            _speculative_sampling(
                tokens_BK[b : b + 1], q_BKV[b : b + 1], depth, logits_BTV[b, None]
            )
            for b in range(texts)
        ]

    return step


def interleaved(
    steps: dict[str, Callable[[], object]], seconds: float, least: int
) -> tuple[dict[str, list[float]], int]:
    """Milliseconds of each step, round after round, every other round backwards.

    Where rounds are long, fewer than `least` do: beyond `_PATIENCE` seconds none is begun.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for name in order:
        # Rules have run once already, to see what they decide.
        if name not in RULES:
            steps[name]()
    begun, rounds, past = time.perf_counter(), 0, 0.0
    while rounds == 0 or (past < _PATIENCE if rounds < least else past < seconds and rounds < 30):
        for name in order:
            start = time.perf_counter()
            steps[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
        order.reverse()
        rounds, past = rounds + 1, time.perf_counter() - begun
    return times, rounds


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a cell is timed, and in how many rounds at least."""

    seconds: float
    rounds: int


@torch.inference_mode()
def chain_cell(
    pool: Pool, drafts: dict[str, Draft], logits_BTV: Tensor, budget: Budget
) -> tuple[tuple[Subject, ...], int]:
    """Times the rules on chains, the read, and the peers."""
    texts = len(logits_BTV)
    flat_RV, chance = logits_BTV.flatten(0, 1), noise_of(texts)
    target = TargetLogits(logits_BTV)
    steps: dict[str, Callable[[], object]] = {READ: lambda: torch.logsumexp(flat_RV, -1)}
    found: dict[str, tuple[Verdict, Watched]] = {}
    for name, draft in drafts.items():
        rule, watched = RULES[name], Watched(logits_BTV)
        found[name] = rule.verify(draft, watched, chance), watched
        steps[name] = lambda r=rule, d=draft: r.verify(d, target, chance)
    steps[HF] = transformers_step(drafts["token"], logits_BTV, pool)
    times, rounds = interleaved(steps, budget.seconds, budget.rounds)
    return subjects(times, found, len(flat_RV)), rounds


@torch.inference_mode()
def tree_cell(
    pool: Pool, drafts: dict[str, Draft], logits_BTV: Tensor, budget: Budget
) -> tuple[tuple[Subject, ...], int]:
    """Times the rules on trees, each beside the rows it visits and a chain of its kept depth."""
    texts, num_rows, _ = logits_BTV.shape
    flat_RV, chance = logits_BTV.flatten(0, 1), noise_of(texts)
    steps: dict[str, Callable[[], object]] = {READ: lambda: torch.logsumexp(flat_RV, -1)}
    found: dict[str, tuple[Verdict, Watched]] = {}
    beside: dict[str, tuple[str, str]] = {}
    target = TargetLogits(logits_BTV)
    for name, draft in drafts.items():
        rule = RULES[name]
        watched = Watched(logits_BTV)
        verdict = rule.verify(draft, watched, chance)
        found[name] = verdict, watched
        steps[name] = lambda r=rule, d=draft: r.verify(d, target, chance)
        num_read = len(watched.asked)
        depth = max(1, round(float(verdict.num_accepted_B.double().mean())))
        beside[name] = f"{READ} of {num_read}", f"chain of {depth}"
        # Which rows they are is nothing to a read: as many from the top.
        steps[beside[name][0]] = lambda n=num_read: torch.logsumexp(flat_RV[:n], -1)
        if beside[name][1] not in steps:
            short = chain(pool, RULES["token"], texts, min(depth, num_rows - 1))
            rows = TargetLogits(logits_BTV[:, : depth + 1].contiguous())
            steps[beside[name][1]] = lambda d=short, t=rows: RULES["token"].verify(d, t, chance)
    times, rounds = interleaved(steps, budget.seconds, budget.rounds)
    made = subjects(times, found, len(flat_RV))
    return tuple(_bounded(subject, beside, times) for subject in made), rounds


def _bounded(
    subject: Subject, beside: dict[str, tuple[str, str]], times: dict[str, list[float]]
) -> Subject:
    if subject.name not in beside:
        return subject
    read, short = beside[subject.name]
    rounds = zip(times[subject.name], times[read], times[short], strict=True)
    return replace(subject, bound=statistics.median(own / (r + c) for own, r, c in rounds))


def subjects(
    times: dict[str, list[float]], found: dict[str, tuple[Verdict, Watched]], num_rows: int
) -> tuple[Subject, ...]:
    """Medians, and what each rule decided."""
    made: list[Subject] = []
    for name, series in times.items():
        ratio = statistics.median(a / b for a, b in zip(series, times[READ], strict=True))
        subject = Subject(name, statistics.median(series), ratio)
        if name in found:
            verdict, watched = found[name]
            kept = float(verdict.num_accepted_B.double().mean())
            subject = replace(subject, kept=kept, visited=len(watched.asked) / num_rows)
        made.append(subject)
    return tuple(made)


def run(options: argparse.Namespace) -> Iterator[Cell]:
    """Every cell of the table, in order."""
    budget = Budget(options.seconds, options.rounds)
    for vocab in options.vocab:
        pool = Pool.random(vocab)
        for texts in options.texts:
            for shape, drafts, rows in shapes(pool, texts, options):
                for dtype in options.dtypes:
                    logits_BTV = pool.logits(texts, rows, DTYPES[dtype])
                    time_cell = chain_cell if shape.startswith("chain") else tree_cell
                    made, rounds = time_cell(pool, drafts, logits_BTV, budget)
                    yield Cell(vocab, texts, shape, dtype, rounds, made)
                    del logits_BTV
                    gc.collect()


def shapes(
    pool: Pool, texts: int, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Draft], int]]:
    """Each shape's name, its drafts by rule, and the rows of a text."""
    for depth in options.k:
        drafts = {
            name: chain(pool, RULES[name], texts, depth) for name in CHAIN_RULES if name in RULES
        }
        yield f"chain {depth}", drafts, depth + 1
    for nodes in options.nodes:
        drafts: dict[str, Draft] = {}
        made: dict[str, Draft] = {}
        for name, rule in RULES.items():
            if not rule.trees:
                continue
            parents = chains(PATHS[nodes]) if name == "gbv" else branched(BRANCHES[nodes])
            # Rules that want their children drawn alike get the same trees.
            key = f"{type(rule.drawing).__name__} {name if name == 'gbv' else ''}"
            if key not in made:
                made[key] = tree(pool, rule, texts, parents)
            drafts[name] = made[key]
        yield f"tree {nodes}", drafts, nodes + 1


@torch.inference_mode()
def floors(vocab: int, seconds: float) -> dict[str, float]:
    """What some rules cannot do without, for a row of logits, over the read of one.

    `sort` is of a row's tokens, once (`gbv`); `noise` the words of Philox for every token
    (`coupled`); `look` one sum of `max(0, p - rho q)` (`kseq` takes it at eight or nine rho);
    `calls` a hundred calls on one number, about what `token` makes for eight texts.
    """
    pool, at = Pool.random(vocab), noise_of(POOL)
    logits, q = pool.logits_PV, pool.laws_PV
    p = torch.softmax(logits, -1)
    order, room, one = (logits * 2**20).long().numpy(), torch.empty_like(p), torch.zeros(1)
    parts = at.seed_B, at.sample_B, at.anchor_B
    steps: dict[str, Callable[[], object]] = {
        READ: lambda: torch.logsumexp(logits, -1),
        "sort": lambda: np.sort(order, axis=1),
        "noise": lambda: noise.shortfall_rows(*parts, vocab),
        "look": lambda: torch.sub(p, q, alpha=1.5, out=room).clamp_(min=0).sum(-1),
        "calls": lambda: [one + 1 for _ in range(100 * POOL)],
    }
    times, _ = interleaved(steps, seconds, 3)
    rows = times.pop(READ)
    return {
        name: statistics.median(a / b for a, b in zip(series, rows, strict=True))
        for name, series in times.items()
    }


def line(cell: Cell) -> str:
    """The cell as a line of the table: ms of the read, then each subject's ratio to it."""
    names = {subject.name: subject for subject in cell.subjects}
    parts = [
        f"{name} {s.ratio:.2f}" + (f" ({s.bound:.2f})" if s.bound is not None else "")
        for name, s in names.items()
        if name in RULES or name == HF
    ]
    head = f"| {cell.vocab} | {cell.texts} | {cell.shape} | {cell.dtype} "
    return head + f"| {names[READ].ms:.2f} | " + ", ".join(parts) + " |"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine. The JSON grows cell by cell."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.vocab, options.texts, options.k, options.nodes = (512,), (2,), (2,), (16,)
        options.seconds, options.rounds = 0.0, 2
    return exit_code(lambda: measured(options, command_of("verification", arguments)))


def measured(options: argparse.Namespace, command: str) -> None:
    """Measures, prints, and saves after each cell."""
    found: dict[str, object] = {
        "others": others_at_work(options),
        # Its sampler of plain torch went with its first engine; what replaced it runs on GPUs.
        VLLM: "installed, not timed: it has no sampler in plain torch"
        if find_spec("vllm")
        else "absent: it does not install here",
        "alpha": {vocab: Pool.random(vocab).alpha() for vocab in options.vocab},
        "floors": {vocab: floors(vocab, options.seconds) for vocab in options.vocab},
    }
    print(f"over the read of a row: {found['floors']}")
    cells: list[Cell] = []
    print("| V | B | shape | dtype | read ms | times the read |\n" + "|---" * 6 + "|")
    for cell in run(options):
        cells.append(cell)
        print(line(cell), flush=True)
        save(options.json, command, found | {"cells": [asdict(one) for one in cells]})


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vocab", type=ints, default=VOCABS, help="vocabularies")
    add("--texts", type=ints, default=BATCHES, help="texts of a batch")
    add("--k", type=ints, default=DEPTHS, help="depths of chains")
    add("--nodes", type=ints, default=tuple(BRANCHES), help="nodes of trees (16, 64)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--seconds", type=float, default=1.0, help="time per cell")
    add("--rounds", type=int, default=3, help="rounds per cell at least")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
