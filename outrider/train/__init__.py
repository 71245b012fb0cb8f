"""Training of the bundled pair, and of pairs like it: recipes, corpus, language modelling, distillation."""

from outrider.train.corpus import write_manifest
from outrider.train.recipe import Recipe, load_recipe
from outrider.train.run import run_recipe

__all__ = ["Recipe", "load_recipe", "run_recipe", "write_manifest"]
