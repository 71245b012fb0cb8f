"""Who can answer golden vectors here: the rules in torch, the references, Triton's bodies."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import torch

from outrider import host
from outrider.certify import tree_paths, vectors
from outrider.certify.reference import Noise, Round
from outrider.certify.reference_trees import DraftedTree, TreeRound
from outrider.certify.vectors import KINDS, ON_CHAINS, Json
from outrider.decoding import RULES, Kind, RoundNoise, TargetLogits
from outrider.decoding.theory import LawRow
from outrider.errors import InvalidConfig, MissingExtra

Answer = Callable[[Json], dict[str, Any]]
BY_POWERS = "gbv"
"""Its reference orders by logarithms, which fractions do not have."""


def reference(case: Json) -> dict[str, Any]:
    """What the reference decides, in fractions; it reads the noise that stands in the case."""
    rule, at = case["rule"], case["noise"]
    exact = float if rule == BY_POWERS else Fraction
    laws = [[[exact(x) for x in law] for law in case[side]] for side in ("draft", "target")]
    base, target = laws
    accept, extra = ([Fraction(u) for u in at[stream]] for stream in ("accept", "extra"))
    chance = Noise(accept.__getitem__, extra.__getitem__, _drawn_already, race=_race(at["gumbel"]))
    if rule in ON_CHAINS:
        found = ON_CHAINS[rule](Round(case["tokens"], target, base, chance))
        return {"path": list(range(1, found.kept + 1)), "token": found.token}
    named = {name: kind for kind, name in KINDS.items()}
    kinds = [named[name] for name in case["kinds"]]
    tree = DraftedTree(case["tokens"], case["parents"], base, kinds)
    kept = tree_paths.reference_of(rule)(TreeRound(tree, target, chance))
    return {"path": list(kept.path), "token": kept.token}


def _drawn_already(index: int) -> Kind:
    raise AssertionError(f"draw {index} of the draft: a case is drafted already")


def _race(gumbel: list[list[float]]) -> Callable[[int, LawRow, int], tuple[int, ...]]:
    def race(position: int, law: LawRow, count: int) -> tuple[int, ...]:
        keys = [(math.log(q) + gumbel[position][x], x) for x, q in enumerate(law) if q > 0]
        return tuple(x for _, x in sorted(keys, reverse=True)[:count])

    return race


def triton(case: Json) -> dict[str, Any]:
    """What the rules decide through Triton's bodies, in float32: on a GPU, or interpreted."""
    draft, target_BTV, chance = vectors.tensors(case, torch.float32)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The bodies read logits.
    target = TargetLogits(target_BTV.log().to(device), None)
    parts = (part.to(device) for part in (chance.seed_B, chance.sample_B, chance.anchor_B))
    with host.as_on_gpu():
        verdict = RULES[case["rule"]].verify(draft.to(device), target, RoundNoise(*parts))
    return vectors.told(verdict)


ANSWERERS: dict[str, Answer] = {
    "torch": vectors.answer,
    "reference": reference,
    "triton": triton,
}


def answerer(name: str) -> Answer:
    """Somebody who answers cases.

    Raises:
        InvalidConfig: a name that is none.
        MissingExtra: Triton is not installed.
    """
    if name not in ANSWERERS:
        raise InvalidConfig(f"--with {name!r}: {', '.join(ANSWERERS)} can answer")
    if name == "triton":
        if find_spec("triton") is None:
            raise MissingExtra("--with triton needs Triton: pip install triton")
        if not torch.cuda.is_available():
            # Read once, when Triton is loaded.
            os.environ.setdefault("TRITON_INTERPRET", "1")
    return ANSWERERS[name]
