"""What the speed benchmark found, as records for JSON and as markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.bench.inflate import Faithfulness
from outrider.bench.machine import Machine
from outrider.bench.paired import Interval


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Speculative against plain decoding of one pair at one cost ratio.

    `cost` is the measured ratio, `cost_after` the same measured again after the timing,
    `cost_wanted` None where the pair is taken as it is. `expected` is the speed-up that chose `k`.
    `same_tokens` counts prompts whose speculative text equals the plain one; `widest_gap` is plain
    decoding's own top-two distance, in logits, at the first difference of the others, the widest of
    them (None: no difference). `as_small` counts prompts whose plain text is the uninflated
    target's.
    """

    pair: str
    vocab: int
    draft_vocab: int
    target_weights: int
    draft_weights: int
    cost_wanted: float | None
    cost: float
    cost_after: float
    k: int
    expected: float
    plain_tok_s: float
    speculative_tok_s: float
    speedup: Interval
    speedups: tuple[float, ...]
    acceptance_rate: float
    mean_acceptance_length: float
    num_prompts: int
    num_tokens: int
    same_tokens: int
    widest_gap: float | None
    as_small: int


@dataclass(frozen=True, slots=True)
class GenerateRow:
    """`drafter=none` against transformers' own `generate` on one checkpoint and prompt length.

    Rates and `speedup` include reading the prompt; `decode_*` are of the tokens after the first.
    """

    target: str
    vocab: int
    prompt_tokens: int
    num_tokens: int
    num_prompts: int
    transformers_tok_s: float
    outrider_tok_s: float
    speedup: Interval
    decode_transformers_tok_s: float
    decode_outrider_tok_s: float
    decode_speedup: Interval
    same_tokens: int
    widest_gap: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run of the benchmark found, and under which conditions.

    `others_before` and `others_during` are the shares of the processors other processes took; None
    where the system does not tell.
    """

    command: str
    dtype: str
    machine: Machine
    others_before: float | None
    others_during: float | None
    seconds: float
    mirrored: bool
    acceptance_per_pos: tuple[float, ...]
    faithful: dict[int, Faithfulness]
    speed: tuple[SpeedRow, ...]
    generate: tuple[GenerateRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report ready for JSON."""
        return asdict(self)

    def markdown(self) -> str:
        """The report as two tables and the conditions below."""
        parts = [speed_table(self.speed)] if self.speed else []
        parts += [generate_table(self.generate)] if self.generate else []
        return "\n\n".join([*parts, self.conditions()]) + "\n"

    def conditions(self) -> str:
        """How and where the numbers were taken, in lines."""
        here = self.machine
        order = (
            "A B C C B A on each prompt"
            if self.mirrored
            else "A B C and C B A on alternate prompts"
        )
        lines = [
            f"`{self.command}`, {self.dtype}, greedy, {self.seconds / 60:.0f} min, order {order}.",
            f"{here.processor}, {here.num_cpus} processors, {here.num_threads} threads, "
            f"{here.capability}; {here.system}, Python {here.python}, torch {here.torch}, "
            f"transformers {here.transformers}.",
            "Load average before: " + " ".join(f"{load:.2f}" for load in here.load_average) + "; "
            f"others' share of the processors before {_share(self.others_before)}, during "
            f"{_share(self.others_during)}.",
            "Brackets: bootstrap 95 % interval of the geometric mean over prompts.",
        ]
        for vocab, found in self.faithful.items():
            lines.append(
                f"Inflated, vocabulary {vocab}: logits differ from the small target's by "
                f"{found.difference:.1e} of the largest; no extra token comes nearer than "
                f"{found.margin:.2g} to the best, over {found.num_rows} rows; plain texts equal to "
                f"the small target's: {self._as_small(vocab)}."
            )
        return "\n".join(f"* {line}" for line in lines)

    def _as_small(self, vocab: int) -> str:
        rows = [row for row in self.speed if row.pair == "inflated" and row.vocab == vocab]
        return f"{rows[0].as_small}/{rows[0].num_prompts}" if rows else "not compared"


def speed_table(rows: Sequence[SpeedRow]) -> str:
    """Plain against speculative decoding."""
    head = (
        "pair", "vocabulary (draft's)", "weights read, M (draft's)", "c", "k", "plain tok/s",
        "speculative tok/s", "speed-up: median", "mean", "accepted", "tokens a round",
        "tokens equal",
    )  # fmt: skip
    return _table(
        head,
        (
            (
                row.pair,
                f"{row.vocab} ({row.draft_vocab})",
                f"{row.target_weights / 1e6:.0f} ({row.draft_weights / 1e6:.1f})",
                f"{row.cost:.3f}",
                str(row.k),
                f"{row.plain_tok_s:.1f}",
                f"{row.speculative_tok_s:.1f}",
                f"{row.speedup.median:.2f}",
                _interval(row.speedup),
                f"{row.acceptance_rate:.0%}",
                f"{row.mean_acceptance_length:.2f}",
                _equal(row.same_tokens, row.num_prompts, row.widest_gap),
            )
            for row in rows
        ),
    )


def generate_table(rows: Sequence[GenerateRow]) -> str:
    """drafter=none against transformers' generate."""
    head = (
        "target", "vocabulary", "prompt", "new", "transformers tok/s", "drafter=none tok/s",
        "ratio",
        "after the first token", "ratio", "tokens equal",
    )  # fmt: skip
    return _table(
        head,
        (
            (
                row.target,
                str(row.vocab),
                str(row.prompt_tokens),
                str(row.num_tokens),
                f"{row.transformers_tok_s:.1f}",
                f"{row.outrider_tok_s:.1f}",
                _interval(row.speedup),
                f"{row.decode_transformers_tok_s:.1f} -> {row.decode_outrider_tok_s:.1f}",
                _interval(row.decode_speedup),
                _equal(row.same_tokens, row.num_prompts, row.widest_gap),
            )
            for row in rows
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _interval(found: Interval) -> str:
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _equal(same: int, num: int, gap: float | None) -> str:
    if gap is None:
        return f"yes, {same}/{num}"
    return f"{same}/{num}, first differences at gaps up to {gap:.1e}"


def _share(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"
