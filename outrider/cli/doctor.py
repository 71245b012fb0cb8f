"""`outrider doctor`: what is installed, what the machine can do, and whether a pair works on it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli import options, terminal
from outrider.cli.timing import measure
from outrider.config import SamplingParams
from outrider.errors import OutriderError, UnsupportedModel

if TYPE_CHECKING:
    from outrider.llm import LLM

PACKAGES = (
    "outrider",
    "outrider-models",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "llama-cpp-python",
)
SELF_TEST_PROMPT = "def main():\n    "
SELF_TEST_TOKENS = 32
NOT_EQUAL = 1
UNUSABLE = 2
REFUSED = "refused"
PASSED, FAILED, NOT_TO_BE_HAD = "passed", "failed", "not to be had"


def doctor(
    model: options.Model = "bundled",
    drafter: options.Drafter = "auto",
    dtype: options.Dtype = None,
    device: options.Device = None,
    json_output: options.Json = False,
) -> int:
    """Report versions, device, arithmetic, attention path, and whether model and drafter fit.

    The path is the attention interface, or the slab for a model that keeps its own attention, or
    refused, each with the reason.

    The self-test decodes a few tokens plainly and speculatively under --strict, greedily and with a
    seed, and says whether they are the very same. Exit code 2 where the pair cannot be used, 1
    where the self-test failed; a pair that is no pair for --strict can be used without.

    \b
    Examples:
      outrider doctor
      outrider doctor --model ./llama --drafter draft:./llama-small
      outrider doctor --json
    """
    report = {
        "versions": versions(),
        "machine": machine(),
        "pair": pair(model, drafter, dtype, device),
    }
    if json_output:
        typer.echo(json.dumps(report, default=str))
    else:
        _print(report)
    if not report["pair"]["compatible"]:
        return UNUSABLE
    return NOT_EQUAL if report["pair"]["strict_self_test"].startswith(FAILED) else 0


def versions() -> dict[str, str]:
    """Installed versions; `not installed` where a package is missing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Processor, cores and threads, and what torch makes of them."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def pair(model: str, drafter: str, dtype: str | None, device: str | None) -> dict[str, Any]:
    """How the pair would run, and whether it can do so exactly; the reason where it cannot."""
    loading = options.Loading(model, drafter, strict=False, dtype=dtype, device=device)
    try:
        info = loading.load().info()
    except UnsupportedModel as error:
        return {"compatible": False, "path": REFUSED, "reason": str(error)}
    except OutriderError as error:
        return {"compatible": False, "reason": str(error)}
    # Nothing was decoded yet, so a controller has nothing to tell of its choices.
    info.pop("control", None)
    return {"compatible": True, **info, **strict_report(replace(loading, strict=True))}


def strict_report(loading: options.Loading) -> dict[str, Any]:
    """Whether the pair runs strictly too, and whether it is exact then."""
    try:
        llm = loading.load()
    except OutriderError as error:
        return {"strict": False, "strict_self_test": f"{NOT_TO_BE_HAD}: {error}"}
    return {"strict": True, "strict_self_test": self_test(llm)}


def self_test(llm: LLM) -> str:
    """`passed`, or what failed or differed between plain and speculative tokens."""
    prompt = llm.tokenizer.encode(SELF_TEST_PROMPT)
    kinds = {
        "greedy": SamplingParams(max_tokens=SELF_TEST_TOKENS, temperature=0, ignore_eos=True),
        "seeded": SamplingParams(max_tokens=SELF_TEST_TOKENS, seed=0, ignore_eos=True),
    }
    for kind, sampling in kinds.items():
        try:
            plain, fast = (measure(llm, prompt, sampling, depth=depth) for depth in (0, None))
        except OutriderError as error:
            return f"{FAILED}: {error}"
        if plain.interrupted or fast.interrupted:
            raise KeyboardInterrupt
        if fast.token_ids != plain.token_ids:
            return f"{FAILED}: {kind} tokens differ"
    return PASSED


def _print(report: dict[str, dict[str, Any]]) -> None:
    console = terminal.out()
    for title, entries in report.items():
        console.out(title, style="bold", highlight=False)
        for name, value in entries.items():
            console.out(f"  {name.replace('_', ' '):<18} {_shown(value, name)}", highlight=False)


def _shown(value: object, name: str) -> str:
    if name == "max_bytes" and value is None:
        return "none"
    if value is None:
        return "by default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(
            f"{inner.replace('_', ' ')} {_shown(entry, inner)}" for inner, entry in value.items()
        )
    if isinstance(value, int) and "bytes" in name:
        return terminal.size(value)
    return str(value)
