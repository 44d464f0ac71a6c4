"""`midflight config ...`: show and check recipes without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import SHIPPED, Overrides, RecipeArgument, warn
from midflight.config import SHIPPED_RECIPES, describe_recipe, describe_scenario, dump_toml, load_recipe
from midflight.errors import RecipeError

config_app = typer.Typer(no_args_is_help=True, help="Show and check recipes without running them.")


@config_app.command()
def show(recipe_path: RecipeArgument, overrides: Overrides = None) -> None:
    """Print the resolved recipe, with all defaults."""
    print(dump_toml(load_recipe(recipe_path, overrides or [])))


@config_app.command()
def check(
    recipe_path: Annotated[
        Path | None, typer.Argument(metavar="RECIPE|DIRECTORY", help=f"a TOML file, or a shipped recipe: {SHIPPED}")
    ] = None,
    overrides: Overrides = None,
    check_all: Annotated[
        bool,
        typer.Option("--all", help="check all recipes that ship, or in DIRECTORY; models and data need not be here"),
    ] = False,
) -> None:
    """Check that a recipe would run: keys, values, model directory, tokenizer, task."""
    from midflight.launch.build import check_recipe
    from midflight.launch.checks import check_recipes, recipes_below

    if check_all:
        if overrides:
            raise RecipeError(f"--all checks recipes as they are; remove {overrides[0]}")
        paths = recipes_below(recipe_path) if recipe_path else list(SHIPPED_RECIPES.values())
        for line in check_recipes(paths):
            print(line)
    elif recipe_path is None:
        raise RecipeError("name a recipe to check, or add --all")
    else:
        recipe = load_recipe(recipe_path, overrides or [])
        check_recipe(recipe)
        warn(recipe)
        print(f"{recipe_path}: ok")


@config_app.command()
def keys(
    scenario: Annotated[bool, typer.Option("--scenario", help="list the keys of scenarios")] = False,
) -> None:
    """List every recipe key with its type, default and meaning."""
    for key, kind, default, description in describe_scenario() if scenario else describe_recipe():
        print(f"{key}  ({kind}, default {default})")
        if description:
            print(f"    {description}")
