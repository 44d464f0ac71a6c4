"""Arguments and options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from midflight.config import SHIPPED_RECIPES, Recipe, recipe_warnings

SHIPPED = ", ".join(SHIPPED_RECIPES)
RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help=f"a TOML file, or a shipped recipe: {SHIPPED}")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="changes to the recipe")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def warn(recipe: Recipe) -> None:
    """Print the warnings about a recipe, one line each, to stderr."""
    for warning in recipe_warnings(recipe):
        print(f"midflight: warning: {warning}", file=sys.stderr)
