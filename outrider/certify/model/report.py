"""What a certification found: one verdict, and the checks it stands on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

Verdict = Literal[
    "lossless",
    "rule bias",
    "numeric drift",
    "control ignored",
    "seed ignored",
    "refused",
    "not looked at",
    "undecided",
    "void",
]
EXIT = {"lossless": 0, "undecided": 3, "void": 3}
"""Exit codes; every other verdict is 1."""
ORDER: tuple[Verdict, ...] = (
    "control ignored",
    "rule bias",
    "seed ignored",
    "numeric drift",
    "undecided",
)
"""What counts most of several findings comes first."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked into.

    Attributes:
        name: what.
        verdict: what it found; `lossless` where nothing speaks against the subject, `refused` where
            it does not take such requests, `not looked at` where it cannot be seen.
        said: one line for a reader.
        evidence: the numbers behind it.
        reproduction: the smallest case that shows it: prompt, parameters, seed; None where nothing
            is wrong.
    """

    name: str
    verdict: Verdict
    said: str
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reproduction: Mapping[str, Any] | None = None

    @property
    def case(self) -> dict[str, Any]:
        """The reproduction as JSON has it, empty without one."""
        return cast("dict[str, Any]", _finite(dict(self.reproduction or {})))


@dataclass(frozen=True, slots=True)
class Report:
    """A certification.

    Attributes:
        subject: who was certified.
        controls: what of the request changes the law.
        within: the total variation per token that `lossless` is held to.
        alpha: the chance that a lossless subject is called anything else.
        checks: everything looked into.
        control: the negative control: a bias as large as `within`, which must be found.
        seconds: what it took.
    """

    subject: str
    controls: Mapping[str, Any]
    within: float
    alpha: float
    checks: tuple[Check, ...]
    control: Check
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The gravest finding; void where the negative control was not found."""
        found = {check.verdict for check in self.checks}
        void = self.control.verdict == "void"
        for verdict in ORDER[:-1]:
            if verdict in found and not (void and verdict == "numeric drift"):
                return verdict
        if void:
            return "void"
        return "undecided" if "undecided" in found else "lossless"

    @property
    def exit_code(self) -> int:
        """0 lossless, 1 not, 3 undecided."""
        return EXIT.get(self.verdict, 1)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a number that is not finite is told as text, as JSON has none."""
        told = {"verdict": self.verdict, "exit_code": self.exit_code, **asdict(self)}
        return cast("dict[str, Any]", _finite(told))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in cast("list[Any]", value)]
    return value
