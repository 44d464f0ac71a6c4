"""Comparison of one recipe under several schedules or losses, with the same problems, seeds and length.

Runs follow one another; the variants alternate within each seed. Every run is a `midflight train` in a process of its
own. If generation and training run at the same time, each has half of the cores; if they take turns, each has all.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.config import Recipe, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import MissingExtraError, RecipeError
from midflight.experiments.accuracy import accuracy_figures
from midflight.experiments.comparison_rows import Figures, combine_seeds, curve, label, run_figures
from midflight.experiments.runs import ENDLESS, NO_EVALUATION, Report, RunLength, check_overrides, train
from midflight.experiments.variants import Variant
from midflight.launch.build import build_grader, check_recipe
from midflight.metrics.jsonl import json_text, read_metrics
from midflight.report.machine import describe_machine
from midflight.report.runs import plot_runs
from midflight.run.directory import create_directory, write_atomically
from midflight.run.evaluation import sampled_accuracy
from midflight.trainer.checkpoints import checkpoints_in

_LENGTH = "--seconds or --steps"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The checked plan of a comparison."""

    recipe_path: Path
    overrides: tuple[str, ...]
    variants: tuple[Variant, ...]
    recipe: Recipe  # of the first variant; only its parts that all variants share are used
    length: RunLength
    num_seeds: int
    accuracy_every: int  # optimizer steps between evaluated checkpoints; 0 for no evaluation

    @property
    def seeds(self) -> list[int]:
        """Consecutive seeds, from the recipe's seed on."""
        return [self.recipe.run.seed + number for number in range(self.num_seeds)]


def plan_comparison(
    recipe_path: Path,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    *,
    length: RunLength,
    num_seeds: int = 1,
    accuracy_every: int = 0,
) -> Comparison:
    """Check a comparison and return its plan; nothing is started or written.

    Raises: RecipeError or ModelError if any of the runs could not start, or the variants cannot be compared.
    """
    length.check()
    if num_seeds < 1:
        raise RecipeError(f"--seeds: should be at least 1, got {num_seeds}")
    if accuracy_every < 0:
        raise RecipeError(f"--accuracy-every: should be at least 0, got {accuracy_every}")
    recipes: list[Recipe] = []
    for variant in variants:
        recipe = load_recipe(recipe_path, [*overrides, *variant.overrides])
        check_recipe(recipe)
        for other, known in zip(variants, recipes, strict=False):
            if recipe == known:
                raise RecipeError(f"{other.text!r} and {variant.text!r} are the same {variant.section}")
        recipes.append(recipe)
    if not recipes[0].eval.num_problems:
        accuracy_every = 0
    options = {"run.directory": "--out", "trainer.max_seconds": _LENGTH, "trainer.max_steps": _LENGTH}
    if accuracy_every:
        options |= dict.fromkeys(("trainer.checkpoint_every", "trainer.keep_checkpoints"), "--accuracy-every")
    check_overrides(overrides, options, "comparison")
    return Comparison(recipe_path, tuple(overrides), tuple(variants), recipes[0], length, num_seeds, accuracy_every)


def run_comparison(comparison: Comparison, out: Path | None, report: Report) -> dict[str, Any]:
    """Run a comparison; return a row per variant, and the runs behind the rows.

    The result is also written to `compare.json` in `out`, and drawn to `compare.png`.
    Raises: RunDirectoryError if `out` is not empty or cannot be written; WorkerError if a run fails.
    """
    out = (out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    create_directory(out)
    machine = describe_machine()
    runs: list[Figures] = []
    for seed in comparison.seeds:
        for variant in comparison.variants:
            position = f"{len(runs) + 1} of {len(comparison.seeds) * len(comparison.variants)}"
            report(f"run {position}: {variant.text}, seed {seed}")
            runs.append(_run(comparison, variant, seed, out, report))
    result = {
        "machine": machine,
        "recipe": str(comparison.recipe_path),
        "overrides": list(comparison.overrides),
        "seconds": comparison.length.seconds,
        "steps": comparison.length.steps,
        "seeds": comparison.seeds,
        "accuracy_every": comparison.accuracy_every,
        "rows": [
            combine_seeds([run for run in runs if run[variant.section] == variant.text])
            for variant in comparison.variants
        ],
        "runs": runs,
    }
    write_atomically(out / "compare.json", json_text(result) + "\n")
    _plot(runs, out, report)
    report(f"written to {out}")
    return result


def _run(comparison: Comparison, variant: Variant, seed: int, out: Path, report: Report) -> Figures:
    directory = out / f"{variant.file_name}-seed-{seed}"
    summary = train(comparison.recipe_path, directory, _run_overrides(comparison, variant, seed))
    report(f"  {summary['steps']} steps, {summary['samples']:,} samples in {summary['train_wall_s']:.1f} s")
    lines = read_metrics(RunDirectory(directory).metrics)
    figures = run_figures(summary, lines, _accuracy(comparison, directory, report))
    return {
        variant.section: variant.text,
        "seed": seed,
        "run_directory": directory.name,
        **figures,
        "curve": curve(lines),
    }


def _run_overrides(comparison: Comparison, variant: Variant, seed: int) -> list[str]:
    """Return the overrides of one run, the user's first."""
    overrides = [
        *comparison.overrides,
        *variant.overrides,
        *comparison.length.overrides,
        f"run.seed={seed}",
        *NO_EVALUATION,
    ]
    if comparison.accuracy_every:
        every = f"trainer.checkpoint_every={comparison.accuracy_every}"
        overrides += [every, f"trainer.keep_checkpoints={ENDLESS}"]
    return overrides


def _accuracy(comparison: Comparison, directory: Path, report: Report) -> Figures:
    """Evaluate a run's checkpoints and delete all but the newest."""
    if not comparison.accuracy_every:
        return accuracy_figures([], lambda _: 0.0)
    checkpoints = checkpoints_in(RunDirectory(directory).checkpoints)
    with build_grader(comparison.recipe) as grader:

        def accuracy(checkpoint: Path) -> float:
            measured = sampled_accuracy(comparison.recipe, checkpoint, grader)
            report(f"  {checkpoint.name}: held-out accuracy {measured:.3f}")
            return measured

        figures = accuracy_figures(checkpoints, accuracy)
    for checkpoint in checkpoints[:-1]:
        shutil.rmtree(checkpoint)
    return figures


def _plot(runs: Sequence[Figures], out: Path, report: Report) -> None:
    path = out / "compare.png"
    try:
        plot_runs([out / run["run_directory"] for run in runs], path, [label(run) for run in runs])
    except MissingExtraError as error:
        report(f"no {path.name}: {error}")
