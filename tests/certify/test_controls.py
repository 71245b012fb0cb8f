"""Controls asked for in turn: near ties are no control ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outrider.certify.endpoint.controls import Controls
from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import Answer, Ask
from outrider.certify.model.plan import Plan
from outrider.certify.model.report import Check

PROMPTS = list("abcdefgh")
OFF = PROMPTS[:3]
"""Whose greedy text has a near tie."""


class Greedy(Server):
    """One text for each prompt, or under `top_k` what it is told; free without any control."""

    def __init__(self, otherwise: Callable[[Ask], str], parted: Sequence[str]) -> None:
        super().__init__("http://x")
        self.otherwise, self.parted = otherwise, parted

    def all(self, asked: Sequence[Ask]) -> list[Answer]:
        return [Answer(self.text(one), "length") for one in asked]

    def ask(self, asked: Ask) -> Answer:
        return self.all([asked])[0]

    def text(self, asked: Ask) -> str:
        params, due = asked.params, f"{asked.prompt}: always the same words"
        if params.top_k == 1 and asked.prompt in self.parted:
            return self.otherwise(asked)
        free = params.temperature == 1 and not params.top_k and params.top_p == 1
        return f"{asked.seed}: free" if free and not params.min_p else due


def top_k(otherwise: Callable[[Ask], str], parted: Sequence[str] = OFF) -> Check:
    checks = Controls(Greedy(otherwise, parted), PROMPTS, Plan(length=8)).checks()
    return next(check for check in checks if check.name == "control top_k")


@pytest.mark.parametrize(
    ("otherwise", "parted", "verdict"),
    [
        (lambda _: "the other of two", OFF, "lossless"),
        (lambda asked: f"{asked.seed}: free", OFF, "control ignored"),
        (lambda asked: f"{asked.seed}: free", PROMPTS, "control ignored"),
        # No near ties part so many.
        (lambda _: "the other of two", PROMPTS, "control ignored"),
    ],
)
def test_near_ties_are_told_from_a_control_ignored(
    otherwise: Callable[[Ask], str], parted: Sequence[str], verdict: str
) -> None:
    assert top_k(otherwise, parted).verdict == verdict
