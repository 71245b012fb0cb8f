"""The rate's course: linear warm-up, a constant phase, a linear decay to zero (WSD, Hu et al. 2024)."""

from outrider.train.recipe import TrainRecipe


def rate_factor(step: int, recipe: TrainRecipe) -> float:
    """What the rates are multiplied with in one step; in the constant phase it does not depend on `tokens`."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    if step < recipe.decay_from:
        return warm
    return warm * (recipe.steps - step) / max(1, recipe.steps - recipe.decay_from)


def context_at(step: int, recipe: TrainRecipe) -> int:
    """Row length in tokens of one step: the last `long_fraction` of the run reads long rows."""
    return recipe.long_context if step >= recipe.long_from else recipe.context
