"""`midflight train --dry-run`: what a run would start and need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from midflight.config import load_recipe, load_scenario
from midflight.metrics.jsonl import json_text


def print_dry_run(
    recipe_path: Path, overrides: Sequence[str], scenario: Path | None, model_config: Path | None, as_json: bool
) -> None:
    """Print the dry run of a recipe; `scenario` and `model_config` are explained at `midflight.launch.dry_run`."""
    from midflight.launch.dry_run import dry_run
    from midflight.report.dry_run import dry_run_text

    recipe = load_recipe(recipe_path, overrides)
    values = dry_run(recipe, load_scenario(scenario) if scenario else None, model_config)
    print(json_text(values) if as_json else dry_run_text(values))
