"""Who takes part: engines, their arms, what they share, and what is known against them."""

from __future__ import annotations

from dataclasses import dataclass

SHARED, EIGHT = "shared", "8 bit"
DTYPES = {"float32": "f32", "bfloat16": "bf16"}
"""What everybody computes in, the weights of arms with 8 bits aside; llama.cpp's and OpenVINO's
names for it."""
FLOAT32 = "float32"
OURS = ("outrider", "outrider-gguf")
PLAIN = {"outrider": "none", "outrider-gguf": "none"}
"""What an engine's plain decoding is called, where it is not `plain`."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine.

    Attributes:
        worker: its file in `workers`.
        folder: the virtual environment it runs in, in the arena's home; None = this Python.
        shared: whether one process holds all arms over one copy of the weights.
        arms: what it can do, plain decoding first.
        core: those of them in every grid but the full one.
        copies: the target's weights that one process holds, in copies of the checkpoint, to guess
            how many processes fit into memory.
        base_mb: what a process takes without any weights.
        without_8_bit: why it has no arm of 8-bit weights; None where it has one.
    """

    worker: str
    folder: str | None
    shared: bool
    arms: tuple[str, ...]
    core: tuple[str, ...]
    copies: float
    base_mb: int
    without_8_bit: str | None = None


ENGINES = {
    "outrider": Engine(
        worker="outrider_worker.py",
        folder=None,
        shared=True,
        arms=(
            "none",
            "auto",
            "draft",
            "ngram",
            "suffix",
            "recycle",
            "int8",
            "early-exit:2",
            "draft+suffix",
            "draft+recycle",
        ),
        core=("none", "auto", "draft"),
        copies=1.5,
        base_mb=600,
        without_8_bit="not for targets in Hugging Face folders; outrider-gguf has it",
    ),
    "outrider-gguf": Engine(
        worker="outrider_gguf_worker.py",
        folder=None,
        shared=False,
        arms=("none", "auto", "draft", "ngram", "q8_0", "q8_0+auto", "q8_0+draft", "q8_0+ngram"),
        core=("none", "auto", "draft"),
        copies=1.2,
        base_mb=600,
    ),
    "transformers": Engine(
        worker="transformers_worker.py",
        folder="transformers",
        shared=True,
        arms=("plain", "assistant", "lookup", "generate_batch"),
        core=("assistant",),
        copies=1.2,
        base_mb=600,
        without_8_bit="a further package would be needed",
    ),
    "llama.cpp": Engine(
        worker="llama_cpp_worker.py",
        folder="llama.cpp",
        shared=False,
        arms=("plain", "draft", "lookup", "q8_0", "q8_0+draft", "q8_0+lookup", "ngram-cache"),
        core=("plain", "draft", "lookup"),
        # Mapped from one file by all of its processes; counted once too often rather than not.
        copies=0.5,
        base_mb=200,
    ),
    "openvino": Engine(
        worker="openvino_worker.py",
        folder="openvino",
        shared=False,
        arms=("plain", "draft", "lookup", "int8"),
        core=("plain", "draft", "lookup"),
        copies=1.3,
        base_mb=400,
    ),
    "vllm": Engine(
        worker="vllm_worker.py",
        folder="vllm",
        shared=False,
        arms=("plain", "draft", "ngram", "suffix"),
        core=("plain", "draft", "ngram"),
        copies=1.2,
        base_mb=2300,
        without_8_bit="a checkpoint quantised by another tool would be needed",
    ),
}
"""In the order in which they appear in tables."""

EIGHT_BITS = ("q8_0", "int8")
IMPOSED = {
    "outrider": ("none", "draft"),
    "outrider-gguf": ("none", "draft"),
    "llama.cpp": ("plain", "draft"),
    "vllm": ("plain", "draft"),
}
"""Who can impose an acceptance, and what that leaves of the arms."""

WRONG = {
    ("openvino", "draft"): "sampling with a draft model does not follow the target's law",
    ("vllm", "draft"): "sampling with a draft model does not follow the target's law",
}
"""Arms whose sampled texts are known not to be the target's (measured: docs/arena.md)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode: an engine and what it is asked for."""

    engine: str
    name: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.name}"

    @classmethod
    def of(cls, text: str) -> Arm:
        """From `engine/name`."""
        engine, _, name = text.partition("/")
        return cls(engine, name)

    @property
    def plain(self) -> Arm:
        """The same engine's plain decoding, of 8 bits where a drafter is beside these."""
        first, beside, _ = self.name.partition("+")
        eight = beside and first in EIGHT_BITS and self.engine != "outrider"
        return Arm(self.engine, first if eight else PLAIN.get(self.engine, "plain"))

    @property
    def precision(self) -> str:
        """Of the target's weights: everybody's, or 8 bits."""
        eight = self.name.partition("+")[0] in EIGHT_BITS and self.engine != "outrider"
        return EIGHT if eight else SHARED

    def wrong(self, temperature: float) -> str | None:
        """What is known against its law at this temperature."""
        return WRONG.get((self.engine, self.name)) if temperature else None


ANCHOR = Arm("outrider", "none")
"""In every heat, so that arms of different heats can be compared through it."""
