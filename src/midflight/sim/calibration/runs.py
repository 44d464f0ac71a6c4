"""The real runs that a calibration is made of, and what they leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import BenchmarkError
from midflight.experiments.compare import RunLength
from midflight.experiments.runs import train
from midflight.launch.build import recipe_schedule
from midflight.metrics.jsonl import MetricsLine, read_metrics
from midflight.run.workers import trainer_role
from midflight.sim.calibration.decode import Turn, rows_per_token, turns_of
from midflight.tracing.reading import read_spans
from midflight.tracing.spans import SpanRecord

_SHORT = 1 / 8  # of the seconds, for runs that only fill in a table
_FEW_IN_FLIGHT = (4, 16)
_STEPS_PER_RL_STEP = 4
_NUM_WARM_UP_STEPS = 3
_NEVER = "trainer.checkpoint_every=1000000000"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """`is_long`: of the full length, in which a policy gets as good as in what is to be predicted."""

    name: str
    colocated: bool
    is_long: bool
    overrides: tuple[str, ...]  # of the schedule

    def seconds(self, of_long_runs: float) -> float:
        return of_long_runs if self.is_long else of_long_runs * _SHORT


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run measured about itself after its first optimizer steps, which are slow."""

    plan: PlannedRun
    directory: Path
    lines: list[MetricsLine]
    first_lines: list[MetricsLine]
    rollout: list[SpanRecord]
    trainer: list[SpanRecord]
    rows_per_token: float

    @property
    def turns(self) -> list[Turn]:
        """As long as if each of their rows sampled a token."""
        return [replace(turn, seconds=turn.seconds * self.rows_per_token) for turn in turns_of(self.rollout)]

    @property
    def lengths(self) -> list[int]:
        """Response tokens of all rollouts that were trained on, from the first step on, siblings side by side."""
        return [length for line in [*self.first_lines, *self.lines] for length in line["length/by_rollout"]]

    @property
    def has_gradient(self) -> list[int]:
        """Of those rollouts: 0 if nothing was computed for it."""
        return [flag for line in [*self.first_lines, *self.lines] for flag in line["has_gradient/by_rollout"]]


def planned_runs(recipe: Recipe) -> list[PlannedRun]:
    """One long run for phases at the same time and one for phases in turns, the recipe's own schedule among them.

    Short ones add other numbers of sequences in flight. Of phases at the same time those drop what is too much, as
    generation would wait for training otherwise.
    """
    schedule = recipe_schedule(recipe)
    in_flight = schedule.max_in_flight
    ours: tuple[str, ...] = ()
    at_once = _pipeline(in_flight) if schedule.colocated else ours
    in_turns = ours if schedule.colocated else _afresh("conventional")
    dropping = [
        PlannedRun(f"in-flight-{size}", False, False, (*_pipeline(size), "schedule.when_full=drop_oldest"))
        for size in (*_FEW_IN_FLIGHT, 2 * in_flight)
        if size != in_flight
    ]
    more_in_turns = (*_afresh("conventional"), f"schedule.steps_per_rl_step={_STEPS_PER_RL_STEP}")
    return [
        PlannedRun("at-once", False, True, at_once),
        PlannedRun("in-turns", True, True, in_turns),
        *dropping,
        PlannedRun(f"in-turns-{_STEPS_PER_RL_STEP}", True, False, more_in_turns),
    ]


def record(
    plan: PlannedRun, recipe_path: Path, overrides: Sequence[str], seconds: float, directory: Path
) -> RecordedRun:
    """Raises: WorkerError if the run fails; BenchmarkError if it is too short to say anything."""
    length = RunLength(seconds=seconds)
    summary = train(
        recipe_path, directory, [*overrides, *plan.overrides, *length.overrides, _NEVER, "eval.num_problems=0"]
    )
    run = RunDirectory(directory)
    lines = read_metrics(run.metrics)
    rollout, trainer = read_spans(run.spans("rollout")), read_spans(run.spans(trainer_role(0)))
    published = [span for span in trainer if span[0] == "publish"]
    if len(lines) < 2 * _NUM_WARM_UP_STEPS:
        raise BenchmarkError(
            f"the run {plan.name} made {len(lines)} optimizer steps in {seconds:g} s, which is not enough to measure;"
            " a longer --seconds would work"
        )
    start_ns = published[_NUM_WARM_UP_STEPS - 1][2]
    return RecordedRun(
        plan,
        directory,
        lines[_NUM_WARM_UP_STEPS:],
        lines[:_NUM_WARM_UP_STEPS],
        [span for span in rollout if span[1] >= start_ns],
        [span for span in trainer if span[1] >= start_ns],
        rows_per_token(rollout, summary["generated_tokens"]),
    )


def _pipeline(num_in_flight: int) -> tuple[str, ...]:
    return (*_afresh("pipeline"), f"schedule.num_in_flight={num_in_flight}")


def _afresh(kind: str) -> tuple[str, ...]:
    """A schedule with nothing of the recipe's own: keys go with a type that changes."""
    other = "pipeline" if kind == "conventional" else "conventional"
    return (f"schedule.type={other}", f"schedule.type={kind}")
