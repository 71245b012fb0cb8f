"""What the speed benchmark is asked to measure, and whom it tells how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from outrider.errors import InvalidConfig

ROWS = ("bundled", "inflated")


class Progress(Protocol):
    """Told how far a run is; `num_steps` texts are timed in all."""

    def step(self, label: str) -> None:
        """The next timed text begins."""
        ...

    def note(self, label: str) -> None:
        """Something else begins: loading, sizing, checking."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        target, draft: checkpoint folders of the pair.
        rows: which of `bundled` (the pair as it is) and `inflated`.
        vocabs: vocabulary sizes of the inflated pairs.
        costs: wanted cost ratios of the inflated drafts.
        num_layers, feed_forward: size of the inflated target.
        num_prompts, num_tokens: prompts timed and tokens a prompt, for plain against speculative.
        generate_prompts, generate_tokens: the same for transformers' generate on the inflated
            target (on the pair as it is, `num_prompts` and `num_tokens` hold); 0 prompts leave
            the comparison out.
        short, long: prompt lengths of the comparison with generate.
        mirrored: run every arm twice on each prompt, the second time in reverse order.
        depths: k for each of `costs` instead of the measured choice.
        num_calibration: prompts, none of them timed, on which acceptance is measured to choose k.
        rounds: repetitions when costs are measured.
        seed: of the inflated weights.
        compiled: forwards as machine code, as `LLM.load(compile=True)` has them.
        dtype: of all weights; None is bfloat16 where the processor computes in it, else float32.
    """

    target: Path
    draft: Path
    rows: tuple[str, ...] = ROWS
    vocabs: tuple[int, ...] = (8192, 152064)
    costs: tuple[float, ...] = (0.03, 0.1, 0.2)
    num_layers: int = 24
    feed_forward: int = 16384
    num_prompts: int = 10
    num_tokens: int = 128
    generate_prompts: int = 4
    generate_tokens: int = 32
    short: int = 128
    long: int = 1900
    mirrored: bool = False
    depths: tuple[int, ...] | None = None
    num_calibration: int = 12
    rounds: int = 12
    seed: int = 0
    compiled: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            if row not in ROWS:
                raise InvalidConfig(f"row {row!r} does not exist; rows are {', '.join(ROWS)}")
        if self.depths is not None and len(self.depths) != len(self.costs):
            raise InvalidConfig(
                f"{len(self.depths)} draft lengths were given for {len(self.costs)} cost ratios; "
                "give one each"
            )
        if self.num_prompts < 1 or self.num_tokens < 2 or self.generate_tokens < 2:
            raise InvalidConfig("at least 1 prompt and 2 tokens a prompt are due")


def num_steps(settings: Settings) -> int:
    """Texts that `run` times, for a progress bar."""
    repetitions = 1 + settings.mirrored
    generate = bool(settings.generate_prompts)
    bundled = (2 * repetitions + 4 * generate) * settings.num_prompts
    arms = 1 + len(settings.costs)
    inflated = len(settings.vocabs) * arms * repetitions * settings.num_prompts
    inflated += 4 * settings.generate_prompts * bool(settings.vocabs)
    return bundled * ("bundled" in settings.rows) + inflated * ("inflated" in settings.rows)
