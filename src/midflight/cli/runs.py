"""`midflight train`, `eval` and `serve`: commands that run a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from midflight.cli.options import Json, Overrides, RecipeArgument
from midflight.config import load_recipe
from midflight.errors import RecipeError
from midflight.metrics.jsonl import json_text


def train(
    target: Annotated[Path, typer.Argument(metavar="RECIPE|RUN_DIR", help="a recipe, or with --resume a run")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted run")] = False,
    as_json: Json = False,
) -> None:
    """Train: generate, score and learn at the same time, with weights updated in flight."""
    from midflight.launch.build import check_recipe
    from midflight.report.progress import print_summary
    from midflight.run.directory import create_run, open_run
    from midflight.run.local import run_locally

    console = Console(stderr=True)
    if resume:
        run, recipe = open_run(target, overrides or [])
        check_recipe(recipe)
    else:
        if target.is_dir():
            raise RecipeError(f"{target} is a directory; to go on with the run in it, add --resume")
        recipe = load_recipe(target, overrides or [])
        check_recipe(recipe)
        run = create_run(recipe)
    summary = run_locally(recipe, run, console)
    if as_json:
        print(json_text(summary))
    else:
        print_summary(summary)


def evaluate(
    recipe_path: RecipeArgument,
    overrides: Overrides = None,
    checkpoint: Annotated[Path | None, typer.Option(help="a model directory; default: the recipe's model")] = None,
) -> None:
    """Accuracy of a checkpoint on held-out problems, as JSON."""
    from dataclasses import asdict

    from midflight.launch.build import check_evaluation
    from midflight.run.evaluation import evaluate_model

    recipe = load_recipe(recipe_path, overrides or [])
    if checkpoint:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": checkpoint.resolve()})})
    check_evaluation(recipe)
    print(json_text(asdict(evaluate_model(recipe, recipe.model.path))))


def serve(
    recipe_path: RecipeArgument,
    overrides: Overrides = None,
    join: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="generate for this run, whose engine.type is http")
    ] = None,
) -> None:
    """Serve the model over HTTP: OpenAI's API, token ids and weight versions, in-flight weight updates."""
    from midflight.run.engine_registry import Registration
    from midflight.run.serve import serve_model

    recipe = load_recipe(recipe_path, overrides or [])
    registration = Registration(join) if join else None

    def announce(url: str) -> None:
        print(f"serving at {url}", flush=True)
        if registration:
            registration.enter(url)

    serve_model(recipe, announce, registration.withdraw if registration else lambda: None)
