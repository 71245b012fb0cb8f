"""Training of the bundled pair and of pairs like it: recipes, corpus, loops, evaluation."""

from outrider.train.corpus import write_manifest
from outrider.train.recipe import Recipe
from outrider.train.recipe_file import load_recipe
from outrider.train.run import run_recipe

__all__ = ["Recipe", "load_recipe", "run_recipe", "write_manifest"]
