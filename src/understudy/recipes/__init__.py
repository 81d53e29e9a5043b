"""Recipes: named starting points of runs. Each is a short Python file that a user can copy and change."""

from understudy.recipes.recipe import NAMES, Recipe, load_recipe, recipe_of_kind, source_of

__all__ = ["NAMES", "Recipe", "load_recipe", "recipe_of_kind", "source_of"]
