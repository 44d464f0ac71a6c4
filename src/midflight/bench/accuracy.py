"""Seconds of RL until held-out sampled accuracy reaches a level: every checkpoint of a run, evaluated afterwards.

The clock is the run's own and includes writing the checkpoints; evaluation is not in it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midflight.bench.machine import describe_machine
from midflight.bench.runs import train
from midflight.config import load_recipe
from midflight.launch.evaluation import evaluate_model
from midflight.trainer.checkpoints import load_state

LEVELS = (0.85, 0.9)


def bench_accuracy(
    recipe: Path, overrides: Sequence[str], seeds: Sequence[int], every_steps: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """For each seed the curve [(wall_s, steps, sampled accuracy)] and when it first reached each level."""
    machine = describe_machine()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="midflight-bench-") as scratch:
        for seed in seeds:
            directory = Path(scratch) / str(seed)
            own = [*overrides, "eval.num_problems=0", f"run.seed={seed}"]
            keep = [f"trainer.checkpoint_every={every_steps}", "trainer.keep_checkpoints=100000"]
            train(recipe, directory, [*own, *keep])
            curve = _curve(recipe, overrides, directory)
            runs.append(
                {"seed": seed, "curve": curve, **{f"seconds_to_{level}": _reached(curve, level) for level in LEVELS}}
            )
            report(json.dumps({key: value for key, value in runs[-1].items() if key != "curve"}))
    medians = {f"seconds_to_{level}": _median([_reached(run["curve"], level) for run in runs]) for level in LEVELS}
    return {
        "machine": machine,
        "overrides": list(overrides),
        "evaluated_every_steps": every_steps,
        **medians,
        "runs": runs,
    }


def _curve(recipe: Path, overrides: Sequence[str], directory: Path) -> list[dict[str, float]]:
    loaded = load_recipe(recipe, overrides)
    points = []
    for checkpoint in (directory / "checkpoints").glob("step_*"):
        state = load_state(checkpoint)
        accuracy = evaluate_model(loaded, checkpoint).sampled_accuracy
        points.append({"wall_s": state.wall_s, "steps": state.version, "sampled_accuracy": accuracy})
    return sorted(points, key=lambda point: point["steps"])


def _reached(curve: Sequence[dict[str, float]], level: float) -> float | None:
    return next((point["wall_s"] for point in curve if point["sampled_accuracy"] >= level), None)


def _median(values: Sequence[float | None]) -> float | None:
    """None if the median run never got there."""
    numbers = sorted(float("inf") if value is None else value for value in values)
    median = statistics.median(numbers)
    return None if median == float("inf") else median
