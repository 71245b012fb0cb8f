"""The rate's course: warm-up, a constant phase, linear decay to zero (WSD, Hu et al. 2024)."""

from outrider.train.recipe import TrainRecipe, UnrolledRecipe


def rate_factor(step: int, recipe: TrainRecipe) -> float:
    """What a step multiplies the rates with; before the decay independent of `tokens`."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    if step < recipe.decay_from:
        return warm
    return warm * (recipe.steps - step) / max(1, recipe.steps - recipe.decay_from)


def context_at(step: int, recipe: TrainRecipe) -> int:
    """Row length in tokens of one step: the last `long_fraction` of the run reads long rows."""
    return recipe.long_context if step >= recipe.long_from else recipe.context


def depth_at(step: int, recipe: TrainRecipe, layers: int) -> int:
    """How many of the model's `layers` are read and trained in one step."""
    return min([layers, *(depth for start, depth in recipe.growth if step >= start)][-1], layers)


def readings_at(step: int, recipe: TrainRecipe, head: UnrolledRecipe) -> int:
    """How many times one step reads each place."""
    return 1 + sum(step >= first for first in head.changes(recipe.steps))
