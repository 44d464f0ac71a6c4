"""Idle share of generation beside a reference model as large as the policy, by the number of preprocessing processes.

Each row is one run of a recipe in a process of its own, with a reward that gives most rollouts a gradient: the
reference scores them all. So few rollouts are in flight that generation is the bottleneck: the trainer waits for it.

The window opens at the end of the first optimizer step and closes at the end of the last. The idle share of generation
is the share of the window in which the rollout process neither decodes nor adopts weights: the time outside its spans
`decode` and `update`. Scoring in the rollout process is idle time. So are saving, sending, handing over, and waiting
because the schedule starts no rollout, which is also given apart (`wait_share`).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.smollm2 import FREQUENT_REWARD
from midflight.config import SHIPPED_RECIPES
from midflight.config.run_directory import RunDirectory
from midflight.errors import BenchmarkError, RecipeError
from midflight.experiments.runs import NO_EVALUATION, RunLength, train
from midflight.metrics.jsonl import read_metrics
from midflight.models.smollm2 import smollm2_directory
from midflight.report.machine import describe_machine
from midflight.run.roles import preprocess_role, trainer_role
from midflight.tracing.reading import read_spans
from midflight.tracing.spans import SpanRecord

Row = dict[str, Any]
MODELS = ("smollm2", "demo")
_BUSY = ("decode", "update")
_WAITING = ("wait", "grade")
_GENERATION_BOUND = ("schedule.num_in_flight=6", "batch.batch_size=16", "sampling.max_tokens=32")
_MAX_IDLE = 0.02


@dataclass(frozen=True, slots=True)
class PreprocessLoad:
    model: str = "smollm2"
    workers: tuple[int, ...] = (0, 1, 2)
    steps: int = 10

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise RecipeError(f"--model: there is no {self.model!r}; known are {', '.join(MODELS)}")
        if self.steps < 2:
            raise RecipeError(f"--steps: the window needs at least 2 steps, got {self.steps}")

    @property
    def recipe(self) -> Path:
        return SHIPPED_RECIPES["smollm2_lora" if self.model == "smollm2" else "cpu_demo"]

    @property
    def overrides(self) -> list[str]:
        overrides = [*RunLength(steps=self.steps).overrides, *NO_EVALUATION, "loss.kl_coefficient=0.01"]
        if self.model == "smollm2":
            overrides += [f"model.path={smollm2_directory()}", FREQUENT_REWARD, *_GENERATION_BOUND]
        return overrides


def bench_preprocess(load: PreprocessLoad, report: Callable[[str], None]) -> dict[str, Any]:
    """Run the recipe with each number of workers; return a row for each, and the targets."""
    rows: list[Row] = []
    for num_workers in load.workers:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / "run"
            train(load.recipe, directory, [*load.overrides, f"preprocess.num_workers={num_workers}"])
            figures = measured(RunDirectory(directory), num_workers)
            rows.append({"machine": describe_machine(), "num_workers": num_workers, **figures})
        report(preprocess_line(rows[-1]))
    return {
        "recipe": load.recipe.stem,
        "options": load.overrides,
        "rows": rows,
        "targets": targets_of(rows),
    }


def measured(run: RunDirectory, num_workers: int) -> Row:
    """Read the figures of a run from its metrics and spans."""
    rollout = read_spans(run.spans("rollout"))
    steps = [span for span in read_spans(run.spans(trainer_role(0))) if span[0] == "train"]
    if len(steps) < 2:
        raise BenchmarkError(f"{run.path}: the trace has fewer than 2 optimizer steps")
    window = steps[0][2], steps[-1][2]
    seconds = (window[1] - window[0]) / 1e9
    lines = read_metrics(run.metrics)[1:]
    decoded = [span for span in rollout if span[0] == "decode" and window[0] <= span[2] <= window[1]]
    num_tokens = sum(span[3]["num_seqs"] for span in decoded)
    roles = [preprocess_role(worker) for worker in range(num_workers)] or ["rollout"]
    scored = [span for role in roles for span in read_spans(run.spans(role)) if span[0] == "score"]
    return {
        "seconds": seconds,
        "idle_share": 1 - _covered(rollout, _BUSY, window) / seconds,
        "wait_share": _covered(rollout, _WAITING, window) / seconds,
        "scoring_share": _covered(rollout, ("score",), window) / seconds,
        "decoded_tokens_per_s": num_tokens / seconds,
        "tokens_per_decoding_s": num_tokens / _covered(rollout, ("decode",), window),
        "trained_samples_per_s": sum(len(line["length/by_rollout"]) for line in lines) / seconds,
        "preprocess_s": statistics.mean(line["time/preprocess_s"] for line in lines),
        "score_s": sum(_seconds(span) for span in scored) / max(len(scored), 1),
        "scored_groups": len(scored),
        **_delays(rollout, scored),
    }


def targets_of(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "name": f"idle share of generation with {row['num_workers']} preprocessing processes",
            "value": row["idle_share"],
            "limit": _MAX_IDLE,
            "holds": row["idle_share"] <= _MAX_IDLE,
        }
        for row in rows
        if row["num_workers"]
    ]


def preprocess_line(row: Row) -> str:
    delay = row["scored_after_s"]
    after = "with its batch" if delay is None else f"{delay:.2f} s after a group is finished"
    return (
        f"{row['num_workers']} processes: idle {row['idle_share']:.1%}, {row['decoded_tokens_per_s']:,.0f} tokens/s"
        f" decoded, {row['trained_samples_per_s']:.2f} samples/s trained, {row['preprocess_s']:.2f} s per batch,"
        f" scored {after}"
    )


def _delays(rollout: Sequence[SpanRecord], scored: Sequence[SpanRecord]) -> Row:
    """Return the time from the end of a group's last rollout to the end of its scoring: median and 95th percentile.

    Both are None in a run that scores groups with their batches.
    """
    sent = {span[3]["group"]: span[1] for span in rollout if span[0] == "send"}
    delays = [(span[2] - sent[span[3]["group"]]) / 1e9 for span in scored if span[3]["group"] in sent]
    median, high = np.percentile(delays, (50, 95)).tolist() if delays else (None, None)
    return {"scored_after_s": median, "scored_after_s_p95": high}


def _covered(spans: Sequence[SpanRecord], names: Sequence[str], window: tuple[int, int]) -> float:
    """Time in the window that is in one or more spans with these names (seconds)."""
    covered, reached = 0, window[0]
    for name, start, end, _ in spans:  # by start
        if name in names and end > reached:
            covered += max(0, min(end, window[1]) - max(start, reached))
            reached = end
    return covered / 1e9


def _seconds(span: SpanRecord) -> float:
    return (span[2] - span[1]) / 1e9
