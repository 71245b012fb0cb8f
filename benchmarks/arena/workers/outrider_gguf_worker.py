"""Outrider over a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wire
from outrider_worker import Outrider

from outrider.drafters import Drafter, NoDrafter
from outrider.errors import OutriderError
from outrider.llm.load import Placement


class OutriderGguf(Outrider):
    """One arm over its file; drafting models are GGUF files too."""

    def __init__(self, task: dict[str, Any]) -> None:
        (arm,) = task["arms"]
        self._precision = "q8_0" if arm.startswith("q8_0") else task["kind"]
        try:
            super().__init__(task)
        except OutriderError as error:
            raise wire.RefusedError(str(error)) from error

    def _placement(self, task: dict[str, Any]) -> Placement:
        return Placement(share_prefixes=False, compile=True)

    def _drafter(self, arm: str) -> Drafter:
        return NoDrafter() if arm == "q8_0" else super()._drafter(arm.removeprefix("q8_0+"))

    def _load(self, folder: str) -> Any:
        """What the arena has converted."""
        model = Path(folder)
        return self._place.load(model.parent / "gguf" / f"{model.name}-{self._precision}.gguf")


if __name__ == "__main__":
    wire.serve(OutriderGguf)
