"""One recipe under several schedules: same problems, seeds and seconds, one run after the other, alternating.

Every run is a `midflight train` in a process of its own. Where generation and training run at the same time each has
half of the cores; where they take turns each has all of them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.bench.accuracy import SecondsToAccuracy, never, seconds_to_accuracy
from midflight.bench.comparison_rows import Figures, combine_seeds, curve, run_figures
from midflight.bench.machine import describe_machine
from midflight.bench.runs import train
from midflight.bench.schedule_specs import ScheduleSpec, parse_schedules
from midflight.config import Recipe, load_recipe
from midflight.errors import MissingExtraError, RecipeError
from midflight.launch.build import build_grader, check_recipe
from midflight.launch.evaluation import sampled_accuracy
from midflight.launch.report import plot_runs
from midflight.launch.run_directory import RunDirectory, create_directory, write_whole
from midflight.metrics.jsonl import read_metrics
from midflight.trainer.checkpoints import checkpoints_in

_ENDLESS = 1_000_000_000  # optimizer steps, or checkpoints: the clock ends a run

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, with everything in it checked."""

    recipe_path: Path
    overrides: tuple[str, ...]
    specs: tuple[ScheduleSpec, ...]
    recipe: Recipe  # under the first schedule; only its other sections matter
    seconds: float  # of training, per run
    num_seeds: int
    accuracy_every: int  # optimizer steps between evaluated checkpoints; 0: no evaluation

    @property
    def seeds(self) -> list[int]:
        """The recipe's, and those after it."""
        return [self.recipe.run.seed + number for number in range(self.num_seeds)]


def plan_comparison(
    recipe_path: Path,
    overrides: Sequence[str],
    schedules: str,
    *,
    seconds: float,
    num_seeds: int = 1,
    accuracy_every: int = 0,
) -> Comparison:
    """What would be compared; nothing is started or written.

    Raises: RecipeError or ModelError, whatever any of the runs would end with, and for what cannot be compared.
    """
    _check_options(seconds, num_seeds, accuracy_every)
    specs = parse_schedules(schedules)
    recipes: list[Recipe] = []
    for spec in specs:
        recipe = load_recipe(recipe_path, [*overrides, *spec.overrides])
        check_recipe(recipe)
        for other, known in zip(specs, recipes, strict=False):
            if recipe.schedule == known.schedule:
                raise RecipeError(f"--schedules: {other.text!r} and {spec.text!r} are the same schedule")
        recipes.append(recipe)
    if not recipes[0].eval.num_problems:
        accuracy_every = 0
    _check_overrides(overrides, accuracy_every)
    return Comparison(recipe_path, tuple(overrides), specs, recipes[0], seconds, num_seeds, accuracy_every)


def run_comparison(comparison: Comparison, out: Path | None, report: Report) -> dict[str, Any]:
    """What `compare.json` in `out` then says: a row per schedule and the runs behind them. Also draws `compare.png`.

    Raises: RunDirectoryError if `out` holds something or cannot be written; WorkerError if a run fails.
    """
    out = (out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    create_directory(out)
    machine = describe_machine()
    runs: list[Figures] = []
    for seed in comparison.seeds:
        for spec in comparison.specs:
            report(f"run {len(runs) + 1} of {len(comparison.seeds) * len(comparison.specs)}: {spec.text}, seed {seed}")
            runs.append(_run(comparison, spec, seed, out, report))
    result = {
        "machine": machine,
        "recipe": str(comparison.recipe_path),
        "overrides": list(comparison.overrides),
        "seconds": comparison.seconds,
        "seeds": comparison.seeds,
        "accuracy_every": comparison.accuracy_every,
        "rows": [combine_seeds([run for run in runs if run["schedule"] == spec.text]) for spec in comparison.specs],
        "runs": runs,
    }
    write_whole(out / "compare.json", json.dumps(result, indent=2) + "\n")
    _plot(runs, out, report)
    report(f"written to {out}")
    return result


def _check_options(seconds: float, num_seeds: int, accuracy_every: int) -> None:
    if not 0 < seconds < math.inf:
        raise RecipeError(f"--seconds: should be greater than 0, got {seconds:g}")
    if num_seeds < 1:
        raise RecipeError(f"--seeds: should be at least 1, got {num_seeds}")
    if accuracy_every < 0:
        raise RecipeError(f"--accuracy-every: should be at least 0, got {accuracy_every}")


def _check_overrides(overrides: Sequence[str], accuracy_every: int) -> None:
    ours = {"run.directory": "--out", "trainer.max_seconds": "--seconds", "trainer.max_steps": "--seconds"}
    if accuracy_every:
        ours |= dict.fromkeys(("trainer.checkpoint_every", "trainer.keep_checkpoints"), "--accuracy-every")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in ours:
            raise RecipeError(f"override {override}: in a comparison {ours[key]} decides about {key}")


def _run(comparison: Comparison, spec: ScheduleSpec, seed: int, out: Path, report: Report) -> Figures:
    name = re.sub(r"[^\w.]+", "-", spec.text)
    directory = out / f"{name}-seed-{seed}"
    summary = train(comparison.recipe_path, directory, _run_overrides(comparison, spec, seed))
    report(f"  {summary['steps']} steps, {summary['samples']:,} samples in {summary['train_wall_s']:.1f} s")
    lines = read_metrics(RunDirectory(directory).metrics)
    figures = run_figures(summary, lines, _reached(comparison, directory, report))
    return {
        "schedule": spec.text,
        "seed": seed,
        "run_directory": directory.name,
        **figures,
        "curve": curve(lines),
    }


def _run_overrides(comparison: Comparison, spec: ScheduleSpec, seed: int) -> list[str]:
    """The recipe's changes in one run, the user's first."""
    overrides = [
        *comparison.overrides,
        *spec.overrides,
        f"run.seed={seed}",
        f"trainer.max_seconds={comparison.seconds}",
        f"trainer.max_steps={_ENDLESS}",
        "eval.num_problems=0",
    ]
    if comparison.accuracy_every:
        every = f"trainer.checkpoint_every={comparison.accuracy_every}"
        overrides += [every, f"trainer.keep_checkpoints={_ENDLESS}"]
    return overrides


def _reached(comparison: Comparison, directory: Path, report: Report) -> SecondsToAccuracy:
    """Evaluates a run's checkpoints; only the newest is left."""
    if not comparison.accuracy_every:
        return never()
    checkpoints = checkpoints_in(RunDirectory(directory).checkpoints)
    with build_grader(comparison.recipe) as grader:

        def accuracy(checkpoint: Path) -> float:
            measured = sampled_accuracy(comparison.recipe, checkpoint, grader)
            report(f"  {checkpoint.name}: held-out accuracy {measured:.3f}")
            return measured

        reached = seconds_to_accuracy(checkpoints, accuracy)
    for checkpoint in checkpoints[:-1]:
        shutil.rmtree(checkpoint)
    return reached


def _plot(runs: Sequence[Figures], out: Path, report: Report) -> None:
    path = out / "compare.png"
    try:
        plot_runs([out / run["run_directory"] for run in runs], path, [run["schedule"] for run in runs])
    except MissingExtraError as error:
        report(f"no {path.name}: {error}")
