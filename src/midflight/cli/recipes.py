"""`midflight config ...`: show and check recipes without running them."""

from __future__ import annotations

from typing import Annotated

import typer

from midflight.cli.options import Overrides, RecipeArgument, warn
from midflight.config import describe_recipe, describe_scenario, dump_toml, load_recipe

config_app = typer.Typer(no_args_is_help=True, help="Show and check recipes without running them.")


@config_app.command()
def show(recipe_path: RecipeArgument, overrides: Overrides = None) -> None:
    """Print the resolved recipe, with all defaults."""
    print(dump_toml(load_recipe(recipe_path, overrides or [])))


@config_app.command()
def check(recipe_path: RecipeArgument, overrides: Overrides = None) -> None:
    """Check that a recipe would run: keys, values, model directory, tokenizer, task."""
    from midflight.launch.build import check_recipe

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
