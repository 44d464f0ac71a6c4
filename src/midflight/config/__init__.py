"""Recipes: typed, frozen, every key documented with its unit. Imports no torch, so that `--help` is instant.

A recipe is TOML; `section.key=value` on the command line overrides it. Relative paths are relative to the recipe's
directory in a recipe, and to the working directory on the command line.

If the command line changes the `type` of a section, the section loses the keys of the old type. `[schedule]`, `[loss]`,
`[streams]` and `[weights]` then start empty, and overrides apply in the order of the command line. `[engine]`,
`[trainer]`, `[advantage]` and `[task]` keep the keys that both types have, and all overrides apply to the new type.
Scenarios, which are simulated, are files of the same form.
"""

from midflight.config.files import (
    SHIPPED_RECIPES,
    describe_recipe,
    describe_scenario,
    dump_toml,
    load_recipe,
    load_scenario,
    model_recipe,
)
from midflight.config.recipe import Recipe
from midflight.config.scenario import Scenario
from midflight.config.warnings import recipe_warnings

__all__ = [
    "SHIPPED_RECIPES",
    "Recipe",
    "Scenario",
    "describe_recipe",
    "describe_scenario",
    "dump_toml",
    "load_recipe",
    "load_scenario",
    "model_recipe",
    "recipe_warnings",
]
