"""Outrider over a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import wire
from outrider_worker import answered

import outrider
from outrider import LLM
from outrider.errors import OutriderError


class OutriderGguf:
    """An `LLM` over one arm's file; drafting models are GGUF files too."""

    def __init__(self, task: dict[str, Any]) -> None:
        torch.set_num_threads(task["threads"])
        (arm,) = task["arms"]
        target = converted(task["target"], "q8_0" if arm == "q8_0" else "f32")
        draft = f"draft:{converted(task['draft'], 'f32')}"
        drafter = {"draft": draft, "q8_0": "none"}.get(arm, arm)
        try:
            self._llm = LLM.load(target, drafter, k=task["k"])
        except OutriderError as error:
            raise wire.RefusedError(str(error)) from error

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"version": f"outrider {outrider.__version__}"}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decodes a job; see `wire.Worker`."""
        return answered(self._llm, job)


def converted(folder: str, precision: str) -> str:
    """Where the arena has put the converted model."""
    model = Path(folder)
    return str(model.parent / "gguf" / f"{model.name}-{precision}.gguf")


if __name__ == "__main__":
    wire.serve(OutriderGguf)
