"""`outrider doctor`: what is installed, what the machine can do, and whether a pair works on it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli import options, terminal
from outrider.cli.timing import measure
from outrider.config import SamplingParams
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.llm import LLM

PACKAGES = ("outrider", "outrider-models", "torch", "transformers", "tokenizers", "numpy")
SELF_TEST_PROMPT = "def main():\n    "
SELF_TEST_TOKENS = 32
UNUSABLE = 2


def doctor(
    model: options.Model = "bundled",
    drafter: options.Drafter = "auto",
    dtype: options.Dtype = None,
    device: options.Device = None,
    json_output: options.Json = False,
) -> int:
    """Report versions, device, arithmetic, attention path, and whether model and drafter fit.

    The self-test decodes a few tokens plainly and speculatively under --strict, greedily and with a
    seed, and says whether they are the very same. Exit code 2 where the pair cannot be used.

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
    return 0 if report["pair"]["compatible"] else UNUSABLE


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
    """How the pair would run, and whether it does so exactly; the reason where it cannot."""
    try:
        llm = options.Loading(model, drafter, strict=True, dtype=dtype, device=device).load()
        return {"compatible": True, **llm.info(), "strict_self_test": self_test(llm)}
    except OutriderError as error:
        return {"compatible": False, "reason": str(error)}


def self_test(llm: LLM) -> str:
    """`passed`, or what differed between plain and speculative tokens under strict."""
    prompt = llm.tokenizer.encode(SELF_TEST_PROMPT)
    kinds = {
        "greedy": SamplingParams(max_tokens=SELF_TEST_TOKENS, temperature=0, ignore_eos=True),
        "seeded": SamplingParams(max_tokens=SELF_TEST_TOKENS, seed=0, ignore_eos=True),
    }
    for kind, sampling in kinds.items():
        plain = measure(llm, prompt, sampling, depth=0)
        if measure(llm, prompt, sampling).token_ids != plain.token_ids:
            return f"failed: {kind} tokens differ"
    return "passed"


def _print(report: dict[str, dict[str, Any]]) -> None:
    console = terminal.out()
    for title, entries in report.items():
        console.out(title, style="bold", highlight=False)
        for name, value in entries.items():
            console.out(f"  {name.replace('_', ' '):<18} {_shown(value)}", highlight=False)


def _shown(value: object) -> str:
    if value is None:
        return "by default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(entry)}" for name, entry in value.items())
    return str(value)
