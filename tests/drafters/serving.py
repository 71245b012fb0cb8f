"""Texts of models through an engine with a drafter, for the tests of several of them."""

from __future__ import annotations

from outrider import SamplingParams
from outrider.drafters import Drafter
from outrider.engine import Emitter, Engine, Requests
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.models.families import random_tokens

RAGGED = [random_tokens(n, n).tolist() for n in (17, 26, 3, 9, 1)]
TREES = TreeBudget(3, 9)


def laws(max_tokens: int) -> dict[str, SamplingParams]:
    """Texts that have to be plain decoding's, token by token."""
    return {
        "greedy": SamplingParams(max_tokens=max_tokens, temperature=0.0),
        "coupled": SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=11),
    }


def served(target, drafter: Drafter, trees: TreeBudget | None = None, **options) -> Requests:
    """An engine of its own."""
    engine = Engine(target, drafter, Emitter(None), trees=trees, **options)
    return Requests(engine, depth=3, end_tokens=frozenset())


def texts(requests: Requests, params: SamplingParams, prompts=RAGGED) -> list[tuple[int, ...]]:
    """What it makes of some prompts."""
    done = requests.complete([Request(tuple(prompt), params) for prompt in prompts])
    return [completion.token_ids for completion in done]
