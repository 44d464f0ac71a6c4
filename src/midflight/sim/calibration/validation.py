"""Whether the simulator, fed with a calibrated scenario, foretells what real runs of the recipe then do.

Predictions are made before the runs, from the scenario and their length alone. The runs have a seed of their own, so
that they are asked other problems than those the calibration measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midflight.config import Recipe, Scenario, load_recipe
from midflight.config.scenario import SimulationConfig
from midflight.errors import ScenarioError
from midflight.experiments.compare import RunLength
from midflight.experiments.runs import kept_in, train
from midflight.experiments.variants import Variant
from midflight.launch.build import check_recipe
from midflight.launch.simulation import simulate_scenario
from midflight.metrics.lag import lag_metrics
from midflight.report.machine import describe_machine
from midflight.sim.simulator.outcome import Outcome

FIGURES = ("trained_tokens_per_s", "mean_lag", "max_lag")
_FIRST_GUESS = 256  # optimizer steps

Figures = dict[str, float]
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Validation:
    """What is predicted and then measured, with everything in it checked."""

    scenario: Scenario
    recipe_path: Path
    overrides: tuple[str, ...]
    variants: tuple[Variant, ...]  # schedules
    recipes: tuple[Recipe, ...]  # of the variants
    seconds: float


def plan_validation(
    scenario: Scenario, recipe_path: Path, overrides: Sequence[str], variants: Sequence[Variant], seconds: float
) -> Validation:
    """Nothing is started or written.

    Raises: RecipeError or ModelError, whatever any of the runs would end with; ScenarioError if the scenario is not of
        this recipe and in seconds.
    """
    RunLength(seconds=seconds).check()
    recipes = tuple(load_recipe(recipe_path, [*overrides, *variant.overrides]) for variant in variants)
    for recipe in recipes:
        check_recipe(recipe)
        _check_same(scenario, recipe)
    return Validation(scenario, recipe_path, tuple(overrides), tuple(variants), recipes, seconds)


def run_validation(validation: Validation, runs: Path | None, report: Report) -> dict[str, Any]:
    """A row per schedule: predicted, measured, and relative errors, None where 0 was measured and not predicted.

    `runs`: where the runs are left, new or empty; nowhere if None.
    Raises: WorkerError if a run fails.
    """
    machine = describe_machine()
    predicted = [predict(validation.scenario, recipe, validation.seconds) for recipe in validation.recipes]
    with kept_in(runs) as directory:
        measured = [_measure(validation, variant, directory, report) for variant in validation.variants]
    return {
        "machine": machine,
        "recipe": str(validation.recipe_path),
        "overrides": list(validation.overrides),
        "seconds": validation.seconds,
        "rows": [
            {"schedule": variant.text, "predicted": foretold, "measured": found, "error": _errors(foretold, found)}
            for variant, foretold, found in zip(validation.variants, predicted, measured, strict=True)
        ],
    }


def predict(scenario: Scenario, recipe: Recipe, seconds: float) -> Figures:
    """What a run of the recipe's schedule does in `seconds`, from its first step on."""
    num_steps = _FIRST_GUESS
    while True:
        simulation = SimulationConfig(
            time_unit=scenario.simulation.time_unit, num_steps=num_steps, num_warm_up_steps=0, seed=recipe.run.seed
        )
        changes = {"schedule": recipe.schedule, "simulation": simulation}
        outcome = simulate_scenario(scenario.model_copy(update=changes))
        if outcome.batches[-1].end >= seconds:
            return _figures(outcome, seconds)
        num_steps *= 2


def validation_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per schedule and figure."""
    lines = [f"{'schedule':36}{'figure':24}{'predicted':>12}{'measured':>12}{'error':>10}"]
    for row in rows:
        for figure in FIGURES:
            error = row["error"][figure]
            lines.append(
                f"{row['schedule']:36}{figure:24}{row['predicted'][figure]:>12,.2f}{row['measured'][figure]:>12,.2f}"
                f"{'-' if error is None else f'{100 * error:+.1f} %':>10}"
            )
    return "\n".join(lines)


def _check_same(scenario: Scenario, recipe: Recipe) -> None:
    if scenario.simulation.time_unit != "s":
        raise ScenarioError(
            f"simulation.time_unit = {scenario.simulation.time_unit!r}: runs are measured in seconds; a scenario that"
            " `midflight calibrate` wrote would work"
        )
    for key in ("batch_size", "group_size"):
        ours, theirs = getattr(scenario.batch, key), getattr(recipe.batch, key)
        if ours != theirs:
            raise ScenarioError(f"batch.{key} = {ours}, and the recipe has {theirs}: it was calibrated for another one")


def _figures(outcome: Outcome, seconds: float) -> Figures:
    num_steps = next(index for index, batch in enumerate(outcome.batches, start=1) if batch.end >= seconds)
    within = dataclasses.replace(outcome, batches=outcome.batches[:num_steps])
    lag = lag_metrics(within.lag_histogram)
    return {"trained_tokens_per_s": within.rate, "mean_lag": lag["lag/mean"], "max_lag": lag["lag/max"]}


def _measure(validation: Validation, variant: Variant, directory: Path, report: Report) -> Figures:
    seed = validation.recipes[0].run.seed + 1
    report(f"{variant.text}: {validation.seconds:g} s")
    overrides = [*validation.overrides, *variant.overrides, f"run.seed={seed}", "eval.num_problems=0"]
    overrides += RunLength(seconds=validation.seconds).overrides
    summary = train(validation.recipe_path, directory / variant.file_name, overrides)
    return {
        "trained_tokens_per_s": summary["trained_tokens"] / summary["train_wall_s"],
        "mean_lag": summary["mean_lag"],
        "max_lag": summary["max_lag"],
    }


def _errors(predicted: Figures, measured: Figures) -> dict[str, float | None]:
    return {figure: _relative(predicted[figure], measured[figure]) for figure in FIGURES}


def _relative(predicted: float, measured: float) -> float | None:
    if measured:
        return predicted / measured - 1
    return None if predicted else 0.0
