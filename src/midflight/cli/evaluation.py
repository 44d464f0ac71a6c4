"""`midflight eval`: figures of any model or run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Json
from midflight.config import Recipe, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError, RunDirectoryError
from midflight.metrics.jsonl import json_text


def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="a run directory (its newest checkpoint), a checkpoint, or a Hugging Face directory",
        ),
    ],
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [SECTION.KEY=VALUE]...",
            help="a TOML file or a shipped recipe; default: the recipe of the run; and changes to the recipe",
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="evaluate the best checkpoint of the run")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="as MODEL_OR_RUN, if the first argument is the recipe")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure avg@k, pass@k and maj@k of a model on held-out problems and on the recipe's evaluation sets."""
    from midflight.launch.build import check_evaluation
    from midflight.report.evaluation_table import evaluation_table
    from midflight.run.evaluation import evaluate_model

    recipe = _recipe(target, rest or [], best, checkpoint)
    if not recipe.eval.has_problems:
        raise RecipeError("eval: there is nothing to evaluate: num_problems = 0, and there are no [[eval.sets]]")
    check_evaluation(recipe, needs_task=recipe.eval.num_problems > 0)
    evaluation = {"model": str(recipe.model.path), **evaluate_model(recipe, recipe.model.path).to_json()}
    print(json_text(evaluation) if as_json else evaluation_table(evaluation))


def _recipe(target: Path, rest: list[str], best: bool, checkpoint: Path | None) -> Recipe:
    """Return the recipe, whose `model.path` is the model to evaluate."""
    names, overrides = _split(rest)
    if checkpoint is not None or not target.is_dir():  # the first argument is the recipe
        if names:
            raise RecipeError(f"{target} is not a directory; `midflight eval MODEL_OR_RUN RECIPE` would work")
        names = [str(target)]
        if checkpoint is None:
            return load_recipe(Path(names[0]), overrides)
        target = checkpoint
    run = _run_of(target)
    if best and run.path != target.resolve():
        raise RecipeError(f"--best needs a run directory, and {target} is none")
    model = _checkpoint_of(run, best) if run.path == target.resolve() else target.resolve()
    if not names and not run.config.is_file():
        raise RecipeError(f"{target} is in no run directory, so a recipe is needed: midflight eval {target} RECIPE")
    recipe = Path(names[0]) if names else run.config
    return load_recipe(recipe, [*overrides, f"model.path={model}"])


def _split(rest: list[str]) -> tuple[list[str], list[str]]:
    """Separate the recipe, if any, from the overrides."""
    names = [text for text in rest[:1] if "=" not in text]
    return names, rest[len(names) :]


def _run_of(path: Path) -> RunDirectory:
    """Return the run that a path is the directory or a checkpoint of; its configuration is missing if there is none."""
    path = path.resolve()
    return RunDirectory(path if (path / "config.toml").is_file() else path.parent.parent)


def _checkpoint_of(run: RunDirectory, best: bool) -> Path:
    from midflight.trainer.best_checkpoint import best_checkpoint
    from midflight.trainer.checkpoints import newest_checkpoint

    if best:
        found = best_checkpoint(run.checkpoints)
        wanted = "best checkpoint; trainer.keep_best and eval.every would make one"
    else:
        found, wanted = newest_checkpoint(run.checkpoints), "checkpoint yet"
    if found is None:
        raise RunDirectoryError(f"{run.path} has no {wanted}")
    return found
