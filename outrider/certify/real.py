"""The bundled pair's texts with and without speculation: bit for bit, or but for near ties."""

from __future__ import annotations

import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version

import torch
from torch import Tensor

from outrider import noise
from outrider.certify.bitwise import Comparison, Run, compare, record
from outrider.config import SamplingParams
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer

DEPTH = 4
SEED = 17
NEAR_TIE = 1e-4
"""Largest gap between the two likeliest tokens at which arithmetic may choose either."""
TOKENS_PER_TIE = 10_000
"""Tokens there must be for each near tie."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination to be compared with plain decoding."""

    dtype: str
    greedy: bool
    strict: bool
    drafter: str
    batch: int

    def __str__(self) -> str:
        chance = "greedy" if self.greedy else "coupled"
        strict = "strict" if self.strict else "not strict"
        return f"{strict}, {self.dtype}, {chance}, {self.drafter}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Compared:
    """A setting's texts beside those of plain decoding.

    `gaps` are, for each text that differs, the gap between the two likeliest tokens of the plain
    run (under the noise, where there is some) at the first difference.
    """

    setting: Setting
    result: Comparison
    gaps: tuple[float, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Strict: equal in every bit. Otherwise: equal tokens, but for few near ties."""
        if self.setting.strict:
            return self.result.equal
        few = len(self.gaps) * TOKENS_PER_TIE <= self.result.rows
        return few and all(gap < NEAR_TIE for gap in self.gaps)


@dataclass(slots=True)
class RealProof:
    """Everything compared."""

    prompts: int
    length: int
    compared: list[Compared] = field(default_factory=list[Compared])
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every setting holds."""
        return all(one.ok for one in self.compared)


def prove_real(
    *,
    num_prompts: int = 100,
    num_loose: int = 200,
    length: int = 100,
    processes: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> RealProof:
    """Compares texts of `length` tokens on held-out code.

    Args:
        num_prompts: prompts under strict: float32 and bfloat16, greedy and coupled, draft and
            ngram, batch 1 and 5.
        num_loose: prompts without strict: float32, greedy and coupled, draft and ngram, batch 5.
        length: tokens per text.
        processes: worker processes, of one thread each.
        progress: called with one line per setting.
    """
    started = time.perf_counter()
    proof = RealProof(num_prompts, length)
    jobs = [
        (d, g, True, num_prompts, length) for d in ("bfloat16", "float32") for g in (True, False)
    ]
    jobs += [("float32", g, False, num_loose, length) for g in (True, False)]
    with multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        for settings in pool.imap(_job, jobs):
            for compared in settings:
                proof.compared.append(compared)
                progress(f"{compared.setting}: {compared.result}, gaps {compared.gaps}")
    proof.seconds = time.perf_counter() - started
    return proof


def _job(job: tuple[str, bool, bool, int, int]) -> list[Compared]:
    return list(compare_settings(*job))


def compare_settings(
    dtype: str, greedy: bool, strict: bool, num_prompts: int, length: int
) -> Iterator[Compared]:
    """The settings of one dtype and kind of chance, beside plain decoding of one text at a time."""
    tokenizer = TextTokenizer(bundled_path("target"))
    prompts = [tokenizer.encode(text) for text in eval_prompts("code")[:num_prompts]]
    kind: torch.dtype = getattr(torch, dtype)
    # Every run reads its prompts itself: shared ones would be equal without proving anything.
    target = HuggingFaceTarget.load(
        bundled_path("target"), dtype=kind, strict=strict, share_prefixes=False
    )
    draft = HuggingFaceTarget.load(bundled_path("draft"), dtype=kind, share_prefixes=False)
    sampling = (
        SamplingParams(max_tokens=length, temperature=0.0)
        if greedy
        else SamplingParams(max_tokens=length, seed=SEED)
    )
    plain_batch = 1 if strict else 5
    plain = record(target, NoDrafter(), prompts, sampling, depth=DEPTH, batch=plain_batch)
    drafters: list[Drafter] = [ModelDrafter(draft), NgramDrafter()]
    for drafter in drafters:
        for batch in (1, 5) if strict else (5,):
            began = time.perf_counter()
            run = record(target, drafter, prompts, sampling, depth=DEPTH, batch=batch)
            yield Compared(
                Setting(dtype, greedy, strict, drafter.name, batch),
                compare(run, plain),
                tuple(_gaps(run, plain, [len(p) for p in prompts], greedy)),
                time.perf_counter() - began,
            )


def _gaps(run: Run, plain: Run, starts: list[int], greedy: bool) -> Iterator[float]:
    for ours, theirs, rows, start in zip(run.tokens, plain.tokens, plain.rows, starts, strict=True):
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                yield top_two_gap(rows[n], None if greedy else start + n)
                break


def top_two_gap(logits_V: Tensor, position: int | None) -> float:
    """How far the likeliest token leads, in nats; at a position under its noise of `SEED`."""
    values_V = logits_V.double()
    if position is not None:
        ids_V = torch.arange(len(values_V))
        values_V = values_V.log_softmax(-1) + noise.gumbels(SEED, 0, position, ids_V)
    first, second = values_V.topk(2).values.tolist()
    return first - second


def as_markdown(proof: RealProof, command: str) -> str:
    """The comparison as a page."""
    machine = f"torch {torch.__version__}, transformers {version('transformers')}"
    lines = [
        "# Proof on real models",
        "",
        f"Written by `{command}`: {machine}, {platform.machine()}, {proof.seconds:.0f} s. "
        f"Result: **{'everything holds' if proof.ok else 'SOMETHING FAILED'}**.",
        "",
        f"Texts of {proof.length} tokens of the bundled pair after held-out prompts,",
        f"{DEPTH} tokens drafted a round, beside plain decoding. Under strict every logits row",
        "behind an emitted token must be `torch.equal`; without it a text may part from the plain",
        "one where the two likeliest",
        f"tokens are within {NEAR_TIE:g}, at most once in {TOKENS_PER_TIE:,} tokens.",
        "",
        "| setting | texts | equal texts | rows | equal rows | gaps at first differences | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in proof.compared:
        r = one.result
        gaps = ", ".join(f"{gap:.1e}" for gap in one.gaps) or "none"
        lines.append(
            f"| {one.setting} | {r.texts} | {r.equal_texts} | {r.rows:,} | {r.equal_rows:,} | "
            f"{gaps} | {'yes' if one.ok else 'NO'} |"
        )
    return "\n".join([*lines, ""])
