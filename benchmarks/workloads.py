"""The workloads that `drafter="auto"` is held to: written down before the controller was.

Each is a pair of models, prompts, a law and a shape of the load. `auto` must be no slower than
plain decoding in any of them, time to first token included. See docs/control.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TargetKind = Literal["bundled", "inflated"]
DraftKind = Literal["own", "other-text", "wrong", "slow"]
Prompts = Literal["code", "prose", "foreign", "copy"]


@dataclass(frozen=True, slots=True)
class Workload:
    """One load that a user may have.

    Attributes:
        name: what tables call it.
        target: the bundled target as it is, or an inflated copy that costs what large models cost.
        draft: `own` is the bundled draft model (inflated with the target), `other-text` one made
            from bigrams of other text, `wrong` one whose every token stands for its neighbour,
            `slow` the target itself.
        prompts: held-out `code`, `prose`, `foreign` (random identifiers), or `copy`: a passage
            to be repeated, which look-ups guess.
        temperature: of the law.
        batch: texts at a time.
        num_tokens: new tokens of a text.
        num_prompt: tokens of a prompt; None leaves prompts as they are.
        draining: texts of a batch have from 1/batch to all of `num_tokens`: the batch drains to 1.
        cold: every repetition begins with a controller that has seen nothing.
    """

    name: str
    target: TargetKind
    draft: DraftKind
    prompts: Prompts
    temperature: float = 0.0
    batch: int = 1
    num_tokens: int = 64
    num_prompt: int | None = None
    draining: bool = False
    cold: bool = False


WORKLOADS = (
    Workload("code", "inflated", "own", "code"),
    Workload("prose", "inflated", "own", "prose"),
    Workload("random identifiers", "inflated", "own", "foreign"),
    Workload("a passage to repeat", "inflated", "own", "copy"),
    Workload("code, temperature 1", "inflated", "own", "code", temperature=1.0),
    Workload("code, temperature 1.5", "inflated", "own", "code", temperature=1.5),
    Workload("prose, temperature 1", "inflated", "own", "prose", temperature=1.0),
    Workload("code, 8 at a time", "inflated", "own", "code", batch=8),
    Workload("code, 32 at a time", "inflated", "own", "code", batch=32, num_tokens=32),
    Workload(
        "code, 8 at a time, temperature 1", "inflated", "own", "code", temperature=1.0, batch=8
    ),
    Workload(
        "code, 32 draining to 1", "inflated", "own", "code", batch=32, num_tokens=64, draining=True
    ),
    Workload("code, drafter of other text", "inflated", "other-text", "code"),
    Workload("code, wrong drafter", "inflated", "wrong", "code"),
    Workload("code, drafter as slow as the target", "inflated", "slow", "code"),
    Workload("4096 tokens in, 16 out", "inflated", "own", "code", num_tokens=16, num_prompt=4096),
    Workload("code, nothing seen before", "inflated", "own", "code", cold=True),
    Workload("code, small target", "bundled", "own", "code"),
    Workload("prose, small target, temperature 1", "bundled", "own", "prose", temperature=1.0),
    Workload("code, small target, 8 at a time", "bundled", "own", "code", batch=8),
    Workload("code, small target, wrong drafter", "bundled", "wrong", "code"),
)

CHANGES = (
    Workload("code", "inflated", "own", "code"),
    Workload("then noise", "inflated", "own", "foreign", temperature=1.5),
    Workload("then code again", "inflated", "own", "code"),
)
"""One after another in one process: each is followed within 50 rounds."""
