"""What each of two processes of test_together does, and tells on its output."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from outrider.errors import InvalidConfig
from outrider.models.checkpoint import build_llama
from outrider.train import distil, loop
from outrider.train import head as heads
from outrider.train.distil import Distillation
from outrider.train.prepare import config_of
from outrider.train.recipe import ModelRecipe, Recipe
from outrider.train.run_draft import NO_CORPUS
from outrider.train.together import Together
from tests.train.test_heads import RECIPE, documents, run_of
from tests.train.train_recipes import DISTIL

SMALL = ModelRecipe(16, 1, 1, 1, 24, head_size=16, max_positions=256, tied=True)


def tell(found: dict[str, Any]) -> None:
    """A line of what was found."""
    print(json.dumps(found), flush=True)


def gradients(together: Together, _: Path) -> list[list[float] | None]:
    """Of three weights: one that both read, one that the first reads, and one that none does."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(3))
    model[0].grad = torch.tensor([1.0 + together.rank])
    if together.rank == 0:
        model[1].grad = torch.ones(1)
    assert together.summed(model, 0.5) == 1.0
    return [None if p.grad is None else p.grad.tolist() for p in model]


def steps(together: Together, folder: Path) -> str:
    """Where only the first has a state."""

    def stop(at: loop.Progress) -> None:
        if at.step == 3:
            raise KeyboardInterrupt

    own = folder / str(together.rank)
    run = run_of()
    given = run.head, run.objective, run.recipe, own
    with patch.object(loop, "CHECKPOINT_S", 0.0), suppress(KeyboardInterrupt):
        if together.leads:
            loop.train(*given, inputs={}, progress=stop)
    try:
        loop.train(*given, inputs={}, together=together)
    except InvalidConfig as error:
        return str(error)
    return "none was missed"


def continued(together: Together, _: Path) -> dict[str, Any]:
    """The target's continuations for a head, and how many of them this process writes."""
    run = run_of()
    with patch.object(heads, "_complete", wraps=heads._complete) as wrote:
        run.objective.backward(run.head, 0, together)
    count = sum(len(call.args[1]) for call in wrote.call_args_list)
    return {"count": count, "rows": run.objective.state()["written"].tolist()}


def pools(together: Together, _: Path) -> dict[str, Any]:
    """The texts of target and draft model, and for how many of both this process has them made."""
    models = [build_llama(config_of(SMALL, 80), seed) for seed in (1, 2)]
    target, draft = models
    with torch.no_grad():
        target.lm_head.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))  # type: ignore[union-attr]
    recipe = Recipe("draft", 3, NO_CORPUS, SMALL, RECIPE.train, distil=DISTIL)
    objective = Distillation(recipe, target, documents(1), documents(2), 0)
    with patch.object(distil, "continue_rows", wraps=distil.continue_rows) as wrote:
        objective.backward(draft, 0, together)
    rows = {name: pool.tolist() for name, pool in objective.state().items()}
    return {"count": wrote.call_count, "rows": rows}


FOUND = {"gradients": gradients, "steps": steps, "continued": continued, "pools": pools}
