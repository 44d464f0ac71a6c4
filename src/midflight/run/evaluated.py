"""Facts about the evaluations of a run, from the files of its directory."""

from __future__ import annotations

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.metrics.evaluations import read_evaluations
from midflight.trainer.best_checkpoint import BestCheckpoint
from midflight.trainer.checkpoints import checkpoint_of


def missed_version(recipe: Recipe, run: RunDirectory, end: int) -> int | None:
    """Return the last version before `end` that was due, if it has a checkpoint and no evaluation; else None."""
    if recipe.eval.interval is None:
        return None
    due = (end - 1) // recipe.eval.interval * recipe.eval.interval
    evaluated = max((line["version"] for line in read_evaluations(run.evaluations)), default=0)
    return due if due > evaluated and checkpoint_of(run.checkpoints, due).exists() else None


def best_checkpoint_of(recipe: Recipe, run: RunDirectory) -> BestCheckpoint | None:
    """Return the best checkpoint of a run, or None if the recipe does not keep it."""
    if not recipe.trainer.keep_best or recipe.eval.interval is None:
        return None
    return BestCheckpoint(run.checkpoints, run.evaluations, recipe.eval.interval)
