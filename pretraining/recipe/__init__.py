"""What to train: one JSON file, read strictly into typed sections.

`load_recipe("tiny")` gives a `Recipe`; its sections are classes whose fields hold type, default, limits and
description. recipes/schema.json and docs/recipe_keys.md are generated from them.
"""

from pretraining.recipe.loading import load_recipe, recipe_names, recipe_schema
from pretraining.recipe.model import model_with_defaults
from pretraining.recipe.recipe import RECIPES, Recipe, accumulation_steps

__all__ = [
    "RECIPES",
    "Recipe",
    "accumulation_steps",
    "load_recipe",
    "model_with_defaults",
    "recipe_names",
    "recipe_schema",
]
