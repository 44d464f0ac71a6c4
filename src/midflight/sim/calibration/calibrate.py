"""Measures this machine with real runs of a recipe, and writes what the simulator and the planner take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.config import Recipe, Scenario, load_recipe
from midflight.config.scenario import ListedLengthsConfig
from midflight.errors import BenchmarkError, RecipeError
from midflight.experiments.compare import RunLength
from midflight.experiments.runs import kept_in
from midflight.launch.build import check_recipe
from midflight.report.machine import describe_machine
from midflight.sim.calibration.runs import RecordedRun, planned_runs, record
from midflight.sim.calibration.scenario import scenario_of

_BUSY = 0.5  # cores that others are using
_OURS = {
    "run.directory": "--out-runs",
    "trainer.max_seconds": "--seconds",
    "trainer.max_steps": "--seconds",
    "trainer.checkpoint_every": "--seconds",
}

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is measured, with everything in it checked."""

    recipe_path: Path
    overrides: tuple[str, ...]
    recipe: Recipe
    seconds: float  # of the long runs


def plan_calibration(recipe_path: Path, overrides: Sequence[str], seconds: float) -> Calibration:
    """What would be measured; nothing is started or written.

    Raises: RecipeError or ModelError, whatever any of the runs would end with, and for what cannot be measured.
    """
    RunLength(seconds=seconds).check()
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in _OURS:
            raise RecipeError(f"override {override}: in a calibration {_OURS[key]} decides about {key}")
    recipe = load_recipe(recipe_path, overrides)
    if recipe.engine.type == "http":
        raise RecipeError("engine.type = 'http': nobody starts servers for a calibration; 'embedded' would work")
    check_recipe(recipe)
    for plan in planned_runs(recipe):
        check_recipe(load_recipe(recipe_path, [*overrides, *plan.overrides]))
    return Calibration(recipe_path, tuple(overrides), recipe, seconds)


def run_calibration(calibration: Calibration, runs: Path | None, report: Report) -> tuple[Scenario, dict[str, Any]]:
    """The scenario that was measured, and the same figures with what they were measured on and from.

    `runs`: where the runs are left, new or empty; nowhere if None.
    Raises: RunDirectoryError if `runs` holds something; WorkerError if a run fails; BenchmarkError if one is too short.
    """
    machine = describe_machine()
    if float(machine["load_average_1min"]) > _BUSY:
        report(f"this machine is busy (load average {machine['load_average_1min']}): it will look slower than it is")
    with kept_in(runs) as directory:
        recorded = _record_all(calibration, directory, report)
    scenario = scenario_of(calibration.recipe, recorded)
    return scenario, {
        "machine": machine,
        "recipe": str(calibration.recipe_path),
        "overrides": list(calibration.overrides),
        "seconds": calibration.seconds,
        **scenario.model_dump(mode="json", exclude={"lengths", "failures", "simulation"}, exclude_none=True),
        "lengths": _lengths_figures(scenario),
        "runs": [_run_figures(run) for run in recorded],
    }


def _record_all(calibration: Calibration, directory: Path, report: Report) -> list[RecordedRun]:
    plans = planned_runs(calibration.recipe)
    recorded: list[RecordedRun] = []
    for number, plan in enumerate(plans, start=1):
        seconds = plan.seconds(calibration.seconds)
        report(f"run {number} of {len(plans)}: {plan.name}, {seconds:g} s")
        try:
            run = record(plan, calibration.recipe_path, calibration.overrides, seconds, directory / plan.name)
        except BenchmarkError as error:
            if plan.is_long:
                raise
            report(f"  left out: {error}")
            continue
        report(f"  {_run_figures(run)['trained_tokens_per_s']:,.0f} trained tokens/s")
        recorded.append(run)
    return recorded


def _lengths_figures(scenario: Scenario) -> dict[str, float]:
    assert isinstance(scenario.lengths, ListedLengthsConfig)
    lengths = scenario.lengths.lengths
    return {"mean": statistics.fmean(lengths), "max": max(lengths), "listed": len(lengths)}


def _run_figures(run: RecordedRun) -> dict[str, Any]:
    tokens = sum(sum(line["length/by_rollout"]) for line in run.lines)
    return {
        "name": run.plan.name,
        "steps": len(run.lines),
        "trained_tokens_per_s": tokens / sum(line["time/step_s"] for line in run.lines),
        "trainer_idle": statistics.fmean(line["idle/trainer_fraction"] for line in run.lines),
        "generation_idle": statistics.fmean(line["idle/generation_fraction"] for line in run.lines),
    }
