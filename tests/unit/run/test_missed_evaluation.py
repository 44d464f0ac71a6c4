"""The version whose evaluation the end of training interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.metrics.evaluations import append_evaluation
from midflight.run.evaluated import missed_version
from midflight.trainer.checkpoints import checkpoint_of


@pytest.mark.parametrize(
    ("every", "evaluated", "end", "missed"),
    [(4, 4, 9, 8), (4, 8, 9, None), (4, 4, 8, None), (4, 0, 3, None), (4, 0, 15, None), (None, 0, 9, None)],
)
def test_only_a_checkpoint_that_was_due_is_missed(
    tmp_path: Path, every: int | None, evaluated: int, end: int, missed: int | None
) -> None:
    overrides = [f"eval.every={every}"] if every else []
    recipe, run = load_recipe(SHIPPED_RECIPES["cpu_demo"], overrides), RunDirectory(tmp_path)
    for version in (4, 8, 9):
        checkpoint_of(run.checkpoints, version).mkdir(parents=True)
    append_evaluation(run.evaluations, evaluated, {"sets": {}})
    assert missed_version(recipe, run, end) == missed
