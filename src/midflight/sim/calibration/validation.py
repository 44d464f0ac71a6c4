"""Validation: compare the simulator's predictions from a calibrated scenario with real runs of the recipe.

Predictions are made before the runs, from the scenario and the length of the runs alone. The runs use another seed than
the calibration, so that they get other problems.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midflight.config import Recipe, Scenario, load_recipe
from midflight.config.scenario import SimulationConfig
from midflight.errors import ScenarioError
from midflight.experiments.runs import NO_EVALUATION, Report, RunLength, train
from midflight.experiments.variants import Variant
from midflight.launch.build import check_recipe
from midflight.launch.simulation import simulate_scenario
from midflight.metrics.lag import lag_metrics
from midflight.report.machine import describe_machine
from midflight.report.text_table import text_table

FIGURES = ("trained_tokens_per_s", "mean_lag", "max_lag")
_FIRST_GUESS = 256  # optimizer steps to simulate at first

Figures = dict[str, float]


def validate(
    scenario: Scenario, recipe_path: Path, variants: Sequence[Variant], seconds: float, report: Report
) -> dict[str, Any]:
    """Return a row per schedule: predicted and measured figures, and relative errors.

    An error is None if 0 was measured but not predicted.
    Raises: before the first run, RecipeError or ModelError if a run would fail with it, and ScenarioError if the
        scenario is for another recipe or not in seconds; later, WorkerError if a run fails.
    """
    RunLength(seconds=seconds).check()
    recipes = [load_recipe(recipe_path, variant.overrides) for variant in variants]
    for recipe in recipes:
        check_recipe(recipe)
        _check_same(scenario, recipe)
    machine = describe_machine()
    predicted = [predict(scenario, recipe, seconds) for recipe in recipes]
    measured: list[Figures] = []
    ours = [*RunLength(seconds=seconds).overrides, f"run.seed={recipes[0].run.seed + 1}", *NO_EVALUATION]
    with tempfile.TemporaryDirectory(prefix="midflight-runs-") as directory:
        for variant in variants:
            report(f"{variant.text}: {seconds:g} s")
            summary = train(recipe_path, Path(directory, variant.file_name), [*variant.overrides, *ours])
            summary["trained_tokens_per_s"] = summary["trained_tokens"] / summary["train_wall_s"]
            measured.append({figure: summary[figure] for figure in FIGURES})
    rows = [
        {
            "schedule": variant.text,
            "predicted": expected,
            "measured": actual,
            "error": {figure: _relative(expected[figure], actual[figure]) for figure in FIGURES},
        }
        for variant, expected, actual in zip(variants, predicted, measured, strict=True)
    ]
    return {"machine": machine, "recipe": str(recipe_path), "seconds": seconds, "rows": rows}


def predict(scenario: Scenario, recipe: Recipe, seconds: float) -> Figures:
    """Predict the figures of a run of the recipe's schedule, up to the first step that ends after `seconds`."""
    num_steps = _FIRST_GUESS
    while True:
        simulation = SimulationConfig(
            time_unit=scenario.simulation.time_unit, num_steps=num_steps, num_warm_up_steps=0, seed=recipe.run.seed
        )
        changes = {"schedule": recipe.schedule, "simulation": simulation}
        result = simulate_scenario(scenario.model_copy(update=changes))
        num_ended = sum(batch.end < seconds for batch in result.batches)
        if num_ended < len(result.batches):
            within = dataclasses.replace(result, batches=result.batches[: num_ended + 1])
            lag = lag_metrics(within.lag_histogram)
            return {"trained_tokens_per_s": within.rate, "mean_lag": lag["lag/mean"], "max_lag": lag["lag/max"]}
        num_steps *= 2


def validation_table(rows: Sequence[dict[str, Any]]) -> str:
    """Render the rows as a table, one line per schedule and figure."""
    table = [["schedule", "figure", "predicted", "measured", "error"]]
    for row in rows:
        for figure, error in row["error"].items():
            numbers = [f"{row[kind][figure]:,.2f}" for kind in ("predicted", "measured")]
            table.append([row["schedule"], figure, *numbers, "-" if error is None else f"{100 * error:+.1f} %"])
    return text_table(table, left=(0, 1))


def _check_same(scenario: Scenario, recipe: Recipe) -> None:
    if scenario.simulation.time_unit != "s":
        raise ScenarioError(
            f"simulation.time_unit = {scenario.simulation.time_unit!r}: runs are measured in seconds; use a scenario"
            " written by `midflight calibrate`"
        )
    for key in ("batch_size", "group_size"):
        ours, theirs = getattr(scenario.batch, key), getattr(recipe.batch, key)
        if ours != theirs:
            raise ScenarioError(
                f"batch.{key} = {ours}, but the recipe has {theirs}: use a scenario calibrated for this recipe"
            )


def _relative(predicted: float, measured: float) -> float | None:
    if measured:
        return predicted / measured - 1
    return None if predicted else 0.0
