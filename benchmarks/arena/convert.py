"""Checkpoints in the formats of llama.cpp and OpenVINO, by their own converters."""

from __future__ import annotations

from pathlib import Path

from benchmarks.arena.engines import DTYPES
from benchmarks.arena.home import Home
from benchmarks.arena.setup import Steps

GPT2 = """
import runpy, sys
root = sys.argv.pop(1)
sys.path[:0] = [root, root + "/gguf-py"]
import conversion.base as base
for kind in vars(base).values():
    if isinstance(kind, type) and "get_vocab_base_pre" in vars(kind):
        kind.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = root + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Their converter knows tokenizers by a checksum, and not this one; prompts are ids here anyway."""


def to_gguf(home: Home, model: Path, precision: str) -> Path:
    """`f32`, `bf16` or `q8_0`; what is there already is taken."""
    out = model.parent / "gguf" / f"{model.name}-{precision}.gguf"
    if not out.is_file():
        out.parent.mkdir(exist_ok=True)
        step = Steps(home, "llama.cpp")
        part = out.with_suffix(".part")
        step(
            str(step.python), "-c", GPT2, str(home.llama_sources), str(model),
            "--outfile", str(part), "--outtype", precision,
        )  # fmt: skip
        part.rename(out)
    return out


def to_openvino(home: Home, model: Path, precision: str) -> Path:
    """`fp32` or `int8`; what is there already is taken."""
    out = model.parent / "openvino" / f"{model.name}-{precision}"
    if not (out / "openvino_model.xml").is_file():
        out.parent.mkdir(exist_ok=True)
        step = Steps(home, "openvino")
        step(
            str(step.python.with_name("optimum-cli")), "export", "openvino", "-m", str(model),
            "--task", "text-generation-with-past", "--weight-format", precision, str(out),
        )  # fmt: skip
    return out


def convert(home: Home, checkpoint: str, draft: str, dtype: str) -> None:
    """Whatever the installed engines want of a checkpoint and one of its drafts.

    OpenVINO is given float32 weights whatever the arithmetic: it converts them when it loads them,
    and its exporter knows no bfloat16.
    """
    folder = home.checkpoint(checkpoint)
    if home.missing("llama.cpp") is None:
        for model in ("target", draft):
            for precision in (DTYPES[dtype], "q8_0"):
                to_gguf(home, folder / model, precision)
    if home.missing("openvino") is None:
        for model, precision in (("target", "fp32"), ("target", "int8"), (draft, "fp32")):
            to_openvino(home, folder / model, precision)
