"""The proof run: enumeration, broken variants, path equality and seeded texts, as one record."""

from __future__ import annotations

import multiprocessing
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.certify import runs
from outrider.certify.certificate import Caught, Certificate, Certified, certify_rules
from outrider.certify.journal import Journal, digest
from outrider.certify.paths import FORMS, PathCount, compare
from outrider.certify.tree_paths import TREE_RULES, combinations_of, compare_trees
from outrider.decoding import RULES

Progress = Callable[[str], None]
BATCH = 5_000
TREE_BATCH = 1_500
DTYPES = "float64", "float32"
PACKAGE = Path(__file__).resolve().parent.parent
Compare = Callable[[str, int, torch.dtype], PathCount]
"""The paths of one batch, given rule, seed and dtype."""
PathKey = tuple[str, str, str]
"""A rule, what it verified (`chains` or `trees`), and the dtype of production."""


@dataclass(slots=True)
class Proof:
    """Everything a proof run found."""

    certificate: Certificate = field(default_factory=Certificate)
    wrong: list[Caught] = field(default_factory=list[Caught])
    paths: dict[PathKey, PathCount] = field(default_factory=dict[PathKey, PathCount])
    seeded: list[str] = field(default_factory=list[str])
    seeded_ok: bool = True
    seconds: float = 0.0
    earlier: int = 0
    """Parts that an earlier run of the same code had done."""

    @property
    def ok(self) -> bool:
        """Whether all that must be equal is, and all that is broken was caught."""
        return (
            self.certificate.ok
            and all(caught.found for caught in self.wrong)
            and all(path.wrong == 0 for path in self.paths.values())
            and all(
                path.excused == 0 for (*_, dtype), path in self.paths.items() if dtype == "float64"
            )
            and self.seeded_ok
        )


def _sources() -> list[Path]:
    """The files that a proof depends on."""
    own = (PACKAGE.glob("*.py"), (PACKAGE / "certify").glob("*.py"))
    return [file for files in (*own, (PACKAGE / "decoding").rglob("*.py")) for file in files]


def chains(rule: str, seed: int, dtype: torch.dtype) -> PathCount:
    """A batch of chains."""
    return compare(rule, seed, BATCH, FORMS[seed % len(FORMS)], dtype)


def trees(rule: str, seed: int, dtype: torch.dtype) -> PathCount:
    """A batch of trees."""
    combinations = combinations_of(rule)
    style, form = combinations[seed % len(combinations)]
    return compare_trees(rule, seed, TREE_BATCH, style, form, dtype)


def compare_many(
    rule: str, batch: Compare, dtype: torch.dtype, min_draws: int, start: int
) -> PathCount:
    """Path equality over batches until `min_draws` uniforms have been read."""
    total = PathCount(rule)
    for seed in count(start):
        total.add(batch(rule, seed, dtype))
        # On chains greedy reads no noise: its rounds are counted instead.
        if max(total.draws, total.rounds if rule == "greedy" else 0) >= min_draws:
            return total
    raise AssertionError("counting has no end")


def prove(
    *,
    num_pairs: int = 60,
    min_draws: int = 1_000_000,
    num_texts: int = 500,
    processes: int = 2,
    progress: Progress = lambda _: None,
    kept: Path | None = None,
) -> Proof:
    """The whole proof.

    Args:
        num_pairs: tabular pairs per rule, drafter and tree.
        min_draws: uniforms of the path comparison per rule and dtype, of chains and of trees.
        num_texts: seeded texts per rule and pair.
        processes: worker processes.
        progress: called with one line whenever a part is done.
        kept: a file of the parts that are done, from which a run that was cut short goes on; None
            keeps none.
    """
    started = time.perf_counter()
    journal: Journal[Any] | None = None
    if kept is not None:
        counts = (num_pairs, min_draws, torch.__version__, np.__version__)
        journal = Journal(kept, digest(_sources(), *counts), (Certified, Caught, PathCount))
    earlier = 0 if journal is None else len(journal)
    progress(f"{earlier} parts are done already")
    proof = Proof(
        certify_rules(num_pairs=num_pairs, processes=processes, progress=progress, journal=journal),
        earlier=earlier,
    )
    with multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        every = [
            ((rule, batch.__name__, dtype), batch, 10_000 * i)
            for i, rule in enumerate(RULES)
            for batch in ((chains, trees) if rule in TREE_RULES else (chains,))
            for dtype in DTYPES
        ]
        paths = {
            key: pool.apply_async(
                compare_many, (key[0], batch, getattr(torch, key[2]), min_draws, start)
            )
            for key, batch, start in every
            if journal is None or str(key) not in journal
        }
        for line, good in runs.seeded_checks(num_texts):
            proof.seeded.append(line)
            proof.seeded_ok &= good
            progress(line)
        for caught in runs.seeded_wrong(num_texts):
            proof.wrong.append(Caught(*caught))
            progress(f"wrong: {caught[0]}: {caught[1]}")
        for key, *_ in every:
            if key in paths:
                found = paths[key].get()
                if journal is not None:
                    journal.keep(str(key), found)
            else:
                assert journal is not None
                found = journal[str(key)]
            proof.paths[key] = found
            progress(f"paths: {key}: {found}")
    proof.seconds = time.perf_counter() - started
    if journal is not None:
        journal.end()
    return proof


def as_markdown(proof: Proof, command: str) -> str:
    """The proof as a page."""
    machine = (
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    )
    took = f"{proof.seconds:.0f} s"
    if proof.earlier:
        took += f" after {proof.earlier} parts that an earlier run of the same code had done"
    lines = [
        "# Proof of losslessness",
        "",
        f"Written by `{command}`: {machine}, {platform.machine()}, {took}. "
        f"Result: **{'everything holds' if proof.ok else 'SOMETHING FAILED'}**.",
        "",
        "## Exact law of whole runs",
        "",
        "Every choice of the noise is enumerated, not drawn: runs of several rounds, each noise",
        "address one undecided uniform in [0, 1), laws that depend on the whole prefix, fractions",
        "throughout. Of a tree every drafted node is enumerated too; the Gumbel noise of `coupled`",
        "is a point of a simplex that its comparisons cut. Lossy rules are held to the law they",
        "declare, seeded and greedy ones also to the very text of plain decoding. `kept` is the",
        "expected number of drafted tokens kept per round on a toy, p = (1/3, 2/3) and",
        "q = (2/3, 1/3) for most chains, p = (1/2, 1/3, 1/6) and q = (1/3, 1/6, 1/2) for the rest;",
        "`most` is the linear program's optimum over all lossless rules there. Where there is a",
        "closed form in `outrider.decoding.theory`, the kept tokens of every pair's first round",
        "equal it.",
        "",
        "| rule | drafter | tree | pairs | leaves | largest case | max total variation | kept "
        "| most | as in theory |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(rule) for rule in proof.certificate.rules),
        "",
        "## Broken on purpose, and caught",
        "",
        "In brackets: where such a defect was reported or read; it may be mended there by now.",
        "",
        "| variant | total variation of its texts (exact), or differing texts | caught |",
        "|---|---|---|",
        *(
            f"| {w.name} | {w.measure} | {'yes' if w.found else 'NO'} |"
            for w in (*proof.certificate.wrong, *proof.wrong)
        ),
        "",
        "## Production equals reference, path by path",
        "",
        "The vectorised rules and the readable lines of `outrider/certify/reference*.py` read the",
        "same Philox noise on random laws of 2 to 6 tokens, dense, sparse or of certain tokens.",
        "Chains are ragged, of 0 to 3 tokens; on them rules for trees are held to the reference",
        "of `token` or `block`. Trees are ragged, of 0 to 9 nodes, siblings drawn in every way the",
        "rule takes, by plain Python, and in the rule's own way by production too. In float32 a",
        "difference within 1e-6 of a decision of the reference is excused and counted.",
        "Greedy reads no noise: its drafts do.",
        "",
        "| rule | drafts | production in | rounds | uniforms read | excused | wrong |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {' | '.join(key)} | {c.rounds:,} | {c.draws:,} | {c.excused} | {c.wrong} |"
            for key, c in proof.paths.items()
        ),
        "",
        "## Seeded rules give the text of plain decoding",
        "",
        *(f"* {line}" for line in proof.seeded),
        "",
    ]
    return "\n".join(lines)


def _row(rule: Certified) -> str:
    held = {None: "", True: "yes", False: "NO"}[rule.as_in_theory]
    return (
        f"| {rule.rule} | {rule.drafter} | {rule.tree} | {rule.cases} | {rule.leaves:,} "
        f"| {rule.largest:,} | {rule.max_tv} | {rule.expected_accepted} | {rule.optimum:.4f} "
        f"| {held} |"
    )
