"""Plain against speculative decoding, drafter=none against transformers' generate: one command.

    python benchmarks/speed.py --json docs/speed.json

Needs an otherwise idle machine, about 20 minutes on two cores and 10 GB of memory; `--smoke` needs
half a minute.
See docs/benchmarks.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

from outrider.bench.report import Report
from outrider.bench.script import command_of, floats, ints, names, others_at_work, parser_of
from outrider.bench.settings import ROWS, Settings, num_steps
from outrider.bench.speed import run
from outrider.errors import OutriderError
from outrider.llm.load import as_dtype
from outrider.models.bundled import bundled_path, eval_prompts

SMOKE = {
    "vocabs": (8192,),
    "costs": (0.2,),
    "num_layers": 9,
    "feed_forward": 2048,
    "num_prompts": 2,
    "num_tokens": 16,
    "generate_prompts": 1,
    "generate_tokens": 8,
    "short": 32,
    "long": 256,
    "num_calibration": 2,
    "rounds": 3,
}


class TextProgress:
    """One line on stderr, rewritten: how many texts are timed, the minutes gone, what runs now."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.perf_counter()

    def step(self, label: str) -> None:
        """The next timed text begins."""
        self._show(label)
        self._done += 1

    def note(self, label: str) -> None:
        """Something else begins."""
        self._show(label)

    def _show(self, label: str) -> None:
        filled = 24 * self._done // max(1, self._total)
        bar = "#" * filled + "." * (24 - filled)
        minutes = (time.perf_counter() - self._start) / 60
        line = f"[{bar}] {self._done}/{self._total} {minutes:.1f} min  {label}"
        # A log wants lines, a terminal one line.
        print(
            f"\r{line[:118]:<118}" if sys.stderr.isatty() else line,
            end="" if sys.stderr.isatty() else "\n",
            file=sys.stderr,
            flush=True,
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine. The JSON grows pair by pair."""
    options = _parser().parse_args(arguments)
    try:
        settings, texts = _settings(options), _texts(options)
        others = others_at_work(options)
        warnings.filterwarnings("ignore", module="transformers")
        command = command_of("speed", arguments)
        for report in run(settings, texts, TextProgress(num_steps(settings)), command, others):
            _write(report, options.json)
    except OutriderError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 2
    print(file=sys.stderr)
    print(report.markdown())
    return 0


def _write(report: Report, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report.as_dict(), indent=2, default=str) + "\n", "utf-8")


def _settings(options: argparse.Namespace) -> Settings:
    chosen: dict[str, object] = dict(SMOKE) if options.smoke else {}
    given = {
        "rows": options.rows,
        "vocabs": options.vocab,
        "costs": options.costs,
        "depths": options.k,
        "num_prompts": options.prompts,
        "num_tokens": options.tokens,
        "generate_prompts": options.generate_prompts,
        "num_layers": options.layers,
        "feed_forward": options.feed_forward,
        "mirrored": options.mirrored,
        "seed": options.seed,
        "compiled": options.compile,
        "dtype": as_dtype(options.dtype),
    }
    chosen |= {name: value for name, value in given.items() if value is not None}
    target = options.target or bundled_path("target")
    draft = options.draft or bundled_path("draft")
    return Settings(target=target, draft=draft, **chosen)  # pyright: ignore[reportArgumentType]


def _texts(options: argparse.Namespace) -> list[str]:
    if options.prompts_from is None:
        return eval_prompts("code")
    lines = options.prompts_from.read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=names, help=f"which pairs: {','.join(ROWS)} (both)")
    add("--vocab", type=ints, help="vocabularies of the inflated pairs (8192,152064)")
    add("--costs", type=floats, help="cost ratios of the inflated drafts (0.03,0.1,0.2)")
    add("--k", type=ints, help="draft length for each cost ratio, instead of the measured choice")
    add("--prompts", type=int, help="prompts timed (10)")
    add("--tokens", type=int, help="new tokens a prompt (128)")
    add("--generate-prompts", type=int, help="prompts for transformers' generate, 0 = none (4)")
    add("--layers", type=int, help="blocks of the inflated target (24)")
    add("--feed-forward", type=int, help="width of its feed-forwards (16384)")
    add(
        "--mirrored",
        action="store_true",
        default=None,
        help="A B C C B A on each prompt; twice the time",
    )
    add("--compile", action="store_true", help="compiled forwards")
    add("--seed", type=int, help="of the inflated weights (0)")
    add("--dtype", help="float32, bfloat16 (bfloat16 where the processor computes in it)")
    add("--target", type=Path, help="folder of another target than the bundled one")
    add("--draft", type=Path, help="folder of its draft model")
    add("--prompts-from", type=Path, metavar="JSONL", help='prompts, one {"text": ...} a line')
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
