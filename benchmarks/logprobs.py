"""How far log-probabilities under speculation are from plain decoding's, where nothing is strict.

    python benchmarks/logprobs.py --json docs/logprobs.json

The bundled pair, greedy, held-out prompts; each text is compared as far as both have the same
tokens. Half a minute on two cores.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider import LLM, Completion, SamplingParams
from outrider.bench.script import command_of, save
from outrider.models.bundled import eval_prompts

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Drift:
    """Absolute differences of emitted tokens' log-probabilities, in nats."""

    dtype: str
    strict: bool
    tokens: int
    equal_texts: int
    texts: int
    median: float
    most: float


def drift(dtype: str, strict: bool, options: argparse.Namespace) -> Drift:
    """Plain decoding beside drafts of four tokens."""
    llm = LLM.load("bundled", "draft", dtype=dtype, strict=strict, compile=False)
    prompts = eval_prompts("code")[: options.prompts]
    params = SamplingParams(temperature=0, max_tokens=options.tokens, logprobs=0, ignore_eos=True)
    plain, drafted = (llm.generate(prompts, params, depth=depth) for depth in (0, None))
    found = [gap for pair in zip(plain, drafted, strict=True) for gap in gaps(*pair)]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    return Drift(dtype, strict, len(found), equal, len(plain), statistics.median(found), max(found))


def gaps(plain: Completion, drafted: Completion) -> list[float]:
    """Of the tokens before the first that differs."""
    assert plain.logprobs is not None and drafted.logprobs is not None
    found: list[float] = []
    for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
        if one.token != other.token:
            break
        found.append(abs(one.logprob - other.logprob))
    return found


def table(found: Sequence[Drift]) -> str:
    """One line per arithmetic."""
    lines = [
        "| dtype | strict | tokens | texts equal | median | largest |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        strict = "yes" if one.strict else "no"
        lines.append(
            f"| {one.dtype} | {strict} | {one.tokens} | {one.equal_texts}/{one.texts} "
            f"| {one.median:.1e} | {one.most:.1e} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything found as JSON")
    options = parser.parse_args(arguments)
    found = [drift(dtype, strict, options) for strict in (False, True) for dtype in DTYPES]
    print(table(found))
    command = command_of("logprobs", arguments)
    save(options.json, command, {"drift": [asdict(one) for one in found]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
