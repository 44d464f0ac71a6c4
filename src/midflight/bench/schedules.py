"""How many samples each schedule trains per second: same task, model, batch size and steps, alternating.

Pipeline runs one thread in each of its two processes; conventional may use every core in each of its phases.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midflight.bench.machine import describe_machine
from midflight.bench.runs import train

SETTINGS = {
    "pipeline": ["schedule.type=pipeline"],
    "conventional_g1": ["schedule.type=conventional", "schedule.steps_per_rl_step=1"],
    "conventional_g4": ["schedule.type=conventional", "schedule.steps_per_rl_step=4"],
    "conventional_g16": ["schedule.type=conventional", "schedule.steps_per_rl_step=16"],
}


def bench_schedules(recipe: Path, seeds: Sequence[int], steps: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Medians over seeds, and the median of the per-seed speedups over conventional G = 1 and the others."""
    machine = describe_machine()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="midflight-bench-") as scratch:
        for seed in seeds:
            for name, overrides in SETTINGS.items():
                directory = Path(scratch) / f"{name}-{seed}"
                common = ["eval.num_problems=0", f"run.seed={seed}", f"trainer.max_steps={steps}"]
                summary = train(recipe, directory, [*overrides, *common])
                runs.append({"schedule": name, "seed": seed, **_rates(summary)})
                report(f"{name}, seed {seed}: {runs[-1]['trained_samples_per_s']:.1f} samples/s")
    return {"machine": machine, "steps": steps, "rows": _rows(runs), "runs": runs}


def _rates(summary: dict[str, Any]) -> dict[str, Any]:
    wall_s = summary["train_wall_s"]
    return {
        "trained_samples_per_s": summary["samples"] / wall_s,
        "trained_tokens_per_s": summary["trained_tokens"] / wall_s,
        "train_wall_s": wall_s,
        "mean_lag": summary["mean_lag"],
        "max_lag": summary["max_lag"],
        "mean_ess": summary["mean_ess"],
        "update_pause_s": summary["update_pause_s"],
        "idle_generation": summary["idle"]["generation"],
        "idle_trainer": summary["idle"]["trainer"],
    }


def _rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    pipeline = {run["seed"]: run["trained_samples_per_s"] for run in runs if run["schedule"] == "pipeline"}
    rows = []
    for name in SETTINGS:
        own = [run for run in runs if run["schedule"] == name]
        row: dict[str, Any] = {"schedule": name}
        for key in own[0].keys() - {"schedule", "seed"}:
            values = [run[key] for run in own if run[key] is not None]
            row[key] = statistics.median(values) if values else None
        row["pipeline_speedup"] = statistics.median(pipeline[run["seed"]] / run["trained_samples_per_s"] for run in own)
        rows.append(row)
    return rows
