"""The law of texts under sampling controls at full counts, for `scripts/prove controls`.

It stands beside the tests because its reference is written with transformers' own processors.
"""

from __future__ import annotations

import multiprocessing
import platform
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from tests.engine.control_laws import (
    ASKED,
    BLIND,
    DEPTH,
    FIRST,
    LAWS,
    NODES,
    PROMPT,
    RULE_OF,
    RULES,
    VOCAB,
    WIDTH,
    Fit,
    blind,
    due,
    fit,
    samples,
)

LEAST = 1e-4
"""A law whose statistic is rarer by chance fails; the whole proof does so once in 1,600 runs."""
PARTS = 4
"""Jobs a law's samples are made in, each of a seed of its own."""
Counts = Counter[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """Controls, the rule that verifies, and whether rows know their path."""

    name: str
    controls: tuple[str, ...]
    rule: str
    blind: bool = False


@dataclass(slots=True)
class ControlProof:
    """Every case's samples beside its law."""

    count: int
    fits: dict[Case, Fit] = field(default_factory=dict[Case, Fit])
    seconds: float = 0.0

    def holds(self, case: Case) -> bool:
        """Whether the case is as it must be: blind rows must be found."""
        return (self.fits[case].p < LEAST) == case.blind

    @property
    def ok(self) -> bool:
        """Whether all are."""
        return all(map(self.holds, self.fits))


def cases() -> list[Case]:
    """Six combinations, each under one rule, and blind rows under every rule."""
    held = [Case(str(n), tuple(sorted(given)), RULE_OF[n]) for n, given in LAWS.items()]
    return held + [Case("blind", tuple(sorted(BLIND)), rule, blind=True) for rule in RULES]


def _given(case: Case) -> dict[str, object]:
    return BLIND if case.blind else LAWS[int(case.name)]


def _part(job: tuple[Case, int, int]) -> tuple[Case, Counts]:
    case, count, seed = job
    with blind() if case.blind else nullcontext():
        return case, samples(_given(case), case.rule, count, seed)


def prove(
    *,
    count: int = 200_000,
    processes: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> ControlProof:
    """Samples every case `count` times, blind ones a tenth as often.

    Args:
        count: samples per case, a multiple of forty.
        processes: worker processes, of one thread each.
        progress: called with one line per case.
    """
    started = time.perf_counter()
    proof, found, left = ControlProof(count), dict[Case, Counts](), Counter[Case]()
    jobs: list[tuple[Case, int, int]] = []
    for case in cases():
        each = count // PARTS // (10 if case.blind else 1)
        jobs += [(case, each, seed) for seed in range(1, PARTS + 1)]
        found[case], left[case] = Counter(), PARTS
    with multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        for case, counts in pool.imap_unordered(_part, jobs):
            found[case] += counts
            left[case] -= 1
            if not left[case]:
                proof.fits[case] = fit(found[case], due(_given(case)))
                progress(f"{case}: {proof.fits[case]}, p {proof.fits[case].p:.3g}")
    proof.fits = {case: proof.fits[case] for case in found}
    proof.seconds = time.perf_counter() - started
    return proof


def as_markdown(proof: ControlProof, command: str) -> str:
    """The proof as a page."""
    machine = f"torch {torch.__version__}, transformers {version('transformers')}"
    lines = [
        "# Proof of sampling controls",
        "",
        f"Written by `{command}`: {machine}, {platform.machine()}, {proof.seconds:.0f} s. "
        f"Result: **{'everything holds' if proof.ok else 'SOMETHING FAILED'}**.",
        "",
        f"The first {FIRST} of {ASKED} tokens after the prompt {list(PROMPT)} of a random Llama of",
        f"one layer and {VOCAB} tokens, drafted by a table {DEPTH} tokens ahead: chains, and trees",
        f"of {NODES} nodes and {WIDTH} children a row. {proof.count:,} texts for each of six",
        "combinations of `tests/engine/control_rows.py`, in which every control comes, beside",
        "the law of plain decoding, enumerated from the model's plain forward and the processors",
        "of transformers. Pearson's statistic; beginnings due less than five times are one cell.",
        f"A law holds where chance gives so large a statistic more than once in {1 / LEAST:,.0f}.",
        "Rows that are blind to their path (penalties see the text and not the guesses) must not,",
        "on a tenth of the samples.",
        "",
        "| combination | controls | rule | samples | statistic | degrees | p | as it must be |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, one in proof.fits.items():
        count = proof.count // (10 if case.blind else 1)
        lines.append(
            f"| {case.name} | {', '.join(case.controls)} | {case.rule} | {count:,} "
            f"| {one.statistic:.1f} | {one.degrees} | {one.p:.2g} "
            f"| {'yes' if proof.holds(case) else 'NO'} |"
        )
    return "\n".join([*lines, ""])
