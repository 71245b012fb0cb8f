"""A worker that needs no engine: answers, refuses, fails, prints and dies on demand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "arena" / "workers"))

import wire


class Toy:
    """Says what the arm's name asks for."""

    def __init__(self, task: dict[str, Any]) -> None:
        if task["target"] == "nowhere":
            raise wire.RefusedError("there is no such model")
        print("an engine's own words")

    def about(self) -> dict[str, Any]:
        return {"version": "toy 1"}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["arm"] == "dies":
            os._exit(7)
        if job["arm"] == "fails":
            raise ValueError("no such arm")
        if job["arm"] == "refuses":
            raise wire.RefusedError("one text at a time")
        counts = dict.fromkeys(("first_s", "rounds", "drafted", "accepted"))
        texts = [[len(prompt)] * job["tokens"] for prompt in job["prompts"]]
        return {"texts": texts, "seconds": 0.5, **counts}


if __name__ == "__main__":
    wire.serve(Toy)
