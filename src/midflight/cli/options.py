"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="a TOML file, or the shipped recipe cpu_demo")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="changes to the recipe")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
