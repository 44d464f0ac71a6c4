"""Costs of this machine, in seconds, from what short real runs write about themselves.

An iteration of the rollout loop is everything between the starts of two decode steps: the step, which also prefills
what was just admitted, the exchange of responses for grades, saving. Weight updates and batches are delays.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.config.scenario import DelaysConfig, TableDecodeConfig, TrainingConfig
from midflight.errors import BenchmarkError
from midflight.experiments.runs import Report, RunLength, train
from midflight.launch.build import recipe_schedule
from midflight.metrics.jsonl import MetricsLine, read_metrics
from midflight.run.workers import trainer_role
from midflight.tracing.reading import read_spans
from midflight.tracing.spans import SpanRecord
from midflight.types import Float64Array

_SHORT = 1 / 8  # of the seconds, for runs that only add sizes to a table
_FEW_IN_FLIGHT = (4, 16)
_STEPS_PER_RL_STEP = 4
_NUM_WARM_UP_STEPS = 3
_COUNTED_ELSEWHERE = ("update", "preprocess")
_IDLE = ("wait", "grade")
_MIN_ITERATIONS = 20  # near one size, for its time to be fitted


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """`is_long`: of the full length, in which a policy gets as good as in the runs to be predicted."""

    name: str
    colocated: bool
    is_long: bool
    overrides: tuple[str, ...]  # of the schedule


@dataclass(frozen=True, slots=True)
class Iteration:
    num_seqs: int  # sequences in flight
    seconds: float
    num_new: int = 0  # more sequences than in the iteration before


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run measured about itself; spans are those after its first optimizer steps, which are slow."""

    plan: PlannedRun
    all_lines: list[MetricsLine]
    rollout: list[SpanRecord]
    trainer: list[SpanRecord]
    iterations: list[Iteration]

    @property
    def lines(self) -> list[MetricsLine]:
        return self.all_lines[_NUM_WARM_UP_STEPS:]

    def by_rollout(self, key: str) -> list[int]:
        """`key/by_rollout` of all rollouts that were trained on, from the first step on, siblings side by side."""
        return [value for line in self.all_lines for value in line[f"{key}/by_rollout"]]

    def figures(self) -> dict[str, Any]:
        tokens = sum(sum(line["length/by_rollout"]) for line in self.lines)
        return {
            "name": self.plan.name,
            "steps": len(self.lines),
            "trained_tokens_per_s": tokens / sum(line["time/step_s"] for line in self.lines),
            "trainer_idle": _mean(line["idle/trainer_fraction"] for line in self.lines),
            "generation_idle": _mean(line["idle/generation_fraction"] for line in self.lines),
        }


def planned_runs(recipe: Recipe) -> list[PlannedRun]:
    """One long run for phases at the same time and one for phases in turns, the recipe's own schedule among them.

    Short ones add other numbers of sequences in flight. Of phases at the same time those drop what is too much, as
    generation would wait for training otherwise.
    """
    schedule = recipe_schedule(recipe)
    in_flight = schedule.max_in_flight
    at_once = _pipeline(in_flight) if schedule.colocated else ()
    in_turns = () if schedule.colocated else _restarted("conventional")
    dropping = [
        PlannedRun(f"in-flight-{size}", False, False, (*_pipeline(size), "schedule.when_full=drop_oldest"))
        for size in (*_FEW_IN_FLIGHT, 2 * in_flight)
        if size != in_flight
    ]
    more_in_turns = (*_restarted("conventional"), f"schedule.steps_per_rl_step={_STEPS_PER_RL_STEP}")
    return [
        PlannedRun("at-once", False, True, at_once),
        PlannedRun("in-turns", True, True, in_turns),
        *dropping,
        PlannedRun(f"in-turns-{_STEPS_PER_RL_STEP}", True, False, more_in_turns),
    ]


def record_all(
    plans: Sequence[PlannedRun], recipe_path: Path, overrides: Sequence[str], seconds: float, out: Path, report: Report
) -> list[RecordedRun]:
    """All runs, each in a directory of its own in `out`, but for short ones that measured too little.

    `seconds`: of a long run. Raises: WorkerError if a run fails; BenchmarkError if a long one is too short to measure.
    """
    recorded: list[RecordedRun] = []
    for number, plan in enumerate(plans, start=1):
        plan_seconds = seconds if plan.is_long else seconds * _SHORT
        report(f"run {number} of {len(plans)}: {plan.name}, {plan_seconds:g} s")
        try:
            recorded.append(record(plan, recipe_path, overrides, plan_seconds, out / plan.name))
        except BenchmarkError as error:
            if plan.is_long:
                raise
            report(f"  left out: {error}")
        else:
            report(f"  {recorded[-1].figures()['trained_tokens_per_s']:,.0f} trained tokens/s")
    return recorded


def record(
    plan: PlannedRun, recipe_path: Path, overrides: Sequence[str], seconds: float, directory: Path
) -> RecordedRun:
    """One run. Raises: WorkerError if it fails; BenchmarkError if it is too short to say anything."""
    settings = [*RunLength(seconds=seconds).overrides, "trainer.checkpoint_every=1000000000", "eval.num_problems=0"]
    summary = train(recipe_path, directory, [*overrides, *plan.overrides, *settings])
    run = RunDirectory(directory)
    lines = read_metrics(run.metrics)
    if len(lines) < 2 * _NUM_WARM_UP_STEPS:
        raise BenchmarkError(
            f"the run {plan.name} made {len(lines)} optimizer steps in {seconds:g} s, which is not enough to measure;"
            " a longer --seconds would work"
        )
    rollout, trainer = read_spans(run.spans("rollout")), read_spans(run.spans(trainer_role(0)))
    start_ns = [span for span in trainer if span[0] == "publish"][_NUM_WARM_UP_STEPS - 1][2]
    after_warm_up = [span for span in rollout if span[1] >= start_ns]
    iterations = iterations_of(after_warm_up, slots_per_token(rollout, summary["generated_tokens"]))
    return RecordedRun(plan, lines, after_warm_up, [span for span in trainer if span[1] >= start_ns], iterations)


def iterations_of(spans: Sequence[SpanRecord], slots_per_token: float = 1.0) -> list[Iteration]:
    """All iterations but the last, from the spans of a rollout process in order.

    One that ends in waiting has no more than its decode step. Each takes as long as if each slot sampled a token.
    """
    iterations: list[Iteration] = []
    num_before = 0
    decodes = [index for index, span in enumerate(spans) if span[0] == "decode"]
    for index, following in itertools.pairwise(decodes):
        _, start, end, arguments = spans[index]
        between = spans[index + 1 : following]
        if not any(span[0] in _IDLE for span in between):
            end = spans[following][1] - sum(span[2] - span[1] for span in between if span[0] in _COUNTED_ELSEWHERE)
        num_seqs = arguments["num_seqs"]
        if num_seqs:  # else an update went on in a step that sampled nothing
            iterations.append(Iteration(num_seqs, (end - start) / 1e9 * slots_per_token, max(0, num_seqs - num_before)))
        num_before = num_seqs
    return iterations


def slots_per_token(spans: Sequence[SpanRecord], num_tokens: int) -> float:
    """Slots in use per sampled token, over a whole run: a slot whose prompt is being prefilled samples none."""
    num_seqs: int = sum(span[3]["num_seqs"] for span in spans if span[0] == "decode")
    return max(1.0, num_seqs / max(num_tokens, 1))


def fit_table(
    iterations: Sequence[Iteration], mean_length: float | None = None, num_devices: int = 1
) -> TableDecodeConfig:
    """t(h), linear between powers of two, by least squares; the sum of all iterations is kept.

    With `mean_length`, the mean tokens of a response, what admitting sequences takes is fitted as well and spread
    over all of their tokens: else a phase that begins with all of them would make full batches look slow.
    A table's times and rates must not go down from one size to the next. Where noise makes them, the larger size
    takes the smaller one's.
    Raises: BenchmarkError if there are too few iterations.
    """
    rows = np.array([each.num_seqs for each in iterations], np.float64)
    seconds = np.array([each.seconds for each in iterations])
    sizes = _sizes(rows)
    if not len(sizes):
        raise BenchmarkError(f"the run took only {len(iterations)} decode steps, which is not enough to measure them")
    columns = _hats(rows, sizes)
    if mean_length is None:
        times, *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    else:
        num_new = np.array([each.num_new for each in iterations], np.float64)
        fitted, *_ = np.linalg.lstsq(np.column_stack([columns, num_new]), seconds, rcond=None)
        times = fitted[:-1] + max(0.0, fitted[-1]) / mean_length * sizes
    rates = np.maximum.accumulate(sizes / np.maximum.accumulate(times))
    return TableDecodeConfig(
        gpus_per_engine=num_devices,
        sizes=tuple(sizes.astype(int).tolist()),
        rates=tuple(round(rate, 1) for rate in rates.tolist()),
        beyond="hold",
    )


def fit_training(lines: Sequence[MetricsLine], num_devices: int = 1) -> TrainingConfig:
    """Busy seconds of the steps against their tokens, by least squares; the sum of all steps is kept.

    Tokens are those that carried loss in a forward pass: groups without a gradient are left out of it.
    Raises: BenchmarkError if there are too few steps.
    """
    if len(lines) < 2:
        raise BenchmarkError(f"the run took only {len(lines)} optimizer steps, which is not enough to measure them")
    computed = np.array([sum(line.get("lag/tokens_by_lag", ())) for line in lines], np.float64)
    busy = np.array([_busy_s(line) for line in lines])
    num_trained = sum(sum(line["length/by_rollout"]) for line in lines)
    centered = computed - computed.mean()
    spread = float(centered @ centered)
    slope = float(centered @ busy) / spread if spread else 0.0
    through_zero = float(busy.mean() / computed.mean()) if computed.any() else 0.0
    per_token = min(max(slope, 0.0), through_zero)  # so that neither coefficient is negative
    return TrainingConfig(
        time_per_token=per_token * num_devices,
        time_per_step=max(0.0, float(busy.mean() - per_token * computed.mean())),
        without_gradient_fraction=float(np.clip(1 - computed.sum() / num_trained, 0.0, 1.0)),
    )


def split_delays(
    rollout: Sequence[SpanRecord], trainer: Sequence[SpanRecord], lines: Sequence[MetricsLine], mean_iteration_s: float
) -> DelaysConfig:
    """Delays of a run whose phases go on at the same time.

    New weights are seen at the start of an iteration, half of one late on average: no delay of the weights.
    """
    handovers = {span[3]["batch"]: span for span in rollout if span[0] == "preprocess"}
    transfer = _adoption_s(rollout, trainer) - _bookkeeping_s(trainer, lines) - mean_iteration_s / 2
    return DelaysConfig(
        transfer=max(0.0, transfer),
        preprocess=_grading_s(lines) + _preprocess_s(handovers, trainer),
        update_pause=_mean(_seconds(span) for span in rollout if span[0] == "update"),
        handover_pause=_mean(map(_seconds, handovers.values())),
    )


def colocated_delays(
    rollout: Sequence[SpanRecord], trainer: Sequence[SpanRecord], lines: Sequence[MetricsLine]
) -> DelaysConfig:
    """Delays of a run in turns: from the last token to the first step, and from the last step to a token."""
    decodes = [("decode", span[1], span[2]) for span in rollout if span[0] == "decode" and span[3]["num_seqs"]]
    trains = [("train", span[1], span[2]) for span in trainer if span[0] in ("train", "publish")]
    gaps: dict[str, list[float]] = {"decode": [], "train": []}
    for before, after in itertools.pairwise(sorted([*decodes, *trains], key=lambda phase: phase[1])):
        if before[0] != after[0]:
            gaps[before[0]].append((after[1] - before[2]) / 1e9)
    transfer = _mean(gaps["train"]) - _bookkeeping_s(trainer, lines)
    return DelaysConfig(transfer=max(0.0, transfer), preprocess=max(0.0, _mean(gaps["decode"])))


def _pipeline(num_in_flight: int) -> tuple[str, ...]:
    return (*_restarted("pipeline"), f"schedule.num_in_flight={num_in_flight}")


def _restarted(kind: str) -> tuple[str, ...]:
    """A schedule with nothing of the recipe's own: keys go with a type that changes."""
    other = "pipeline" if kind == "conventional" else "conventional"
    return (f"schedule.type={other}", f"schedule.type={kind}")


def _sizes(rows: Float64Array) -> Float64Array:
    """Powers of two up to the most rows, and those themselves, that enough iterations are near to."""
    if not len(rows):
        return rows
    largest = int(rows.max())
    sizes = np.array(sorted({largest, *(1 << power for power in range(largest.bit_length()))}), np.float64)
    while len(sizes) and (counts := _hats(rows, sizes).sum(axis=0)).min() < _MIN_ITERATIONS:
        sizes = np.delete(sizes, counts.argmin())
    return sizes


def _hats(rows: Float64Array, sizes: Float64Array) -> Float64Array:
    """Shapes: `[iterations, sizes]`: how much of each iteration belongs to each size; rows add up to 1."""
    return np.column_stack([np.interp(rows, sizes, unit) for unit in np.eye(len(sizes))])


def _adoption_s(rollout: Sequence[SpanRecord], trainer: Sequence[SpanRecord]) -> float:
    """Mean seconds from weights being published to the engine starting to take them."""
    published = np.array([span[2] for span in trainer if span[0] == "publish"], np.float64)
    updates = np.array([span[1] for span in rollout if span[0] == "update"], np.float64)
    newest = np.searchsorted(published, updates, side="right") - 1
    first_uses = np.unique(newest[newest >= 0], return_index=True)[1]
    waits = (updates[newest >= 0] - published[newest[newest >= 0]])[first_uses]
    return float(waits.mean()) / 1e9 if len(waits) else 0.0


def _bookkeeping_s(trainer: Sequence[SpanRecord], lines: Sequence[MetricsLine]) -> float:
    """Mean seconds that the trainer goes on with a step after it has published its weights."""
    spans = [span for span in trainer if span[0] in ("train", "publish")]
    num_steps = sum(span[0] == "train" for span in spans)
    return max(0.0, _mean(map(_busy_s, lines)) - sum(map(_seconds, spans)) / max(num_steps, 1))


def _grading_s(lines: Sequence[MetricsLine]) -> float:
    """Mean seconds from a response's end to its grade: those that wait over those that end a second (Little's law)."""
    num_ended = sum(len(line["length/by_rollout"]) for line in lines)
    seconds = sum(line["time/step_s"] for line in lines)
    num_waiting = _mean(line["queue/ungraded_rollouts"] for line in lines)
    return num_waiting * seconds / num_ended if num_ended else 0.0


def _preprocess_s(handovers: dict[int, SpanRecord], trainer: Sequence[SpanRecord]) -> float:
    """Mean seconds from a batch being handed over to its step, where the trainer was waiting for it."""
    waiting_since: int | None = None
    latencies: list[float] = []
    for name, start, _, arguments in trainer:
        if name == "wait" and waiting_since is None:
            waiting_since = start
        if name == "train":
            handover = handovers.get(arguments["version"])
            if handover and waiting_since is not None and waiting_since <= handover[1]:
                latencies.append((start - handover[1]) / 1e9)
            waiting_since = None
    return _mean(latencies) if latencies else _mean(map(_seconds, handovers.values()))


def _busy_s(line: MetricsLine) -> float:
    busy: float = line["time/step_s"] * (1 - line["idle/trainer_fraction"])
    return busy


def _seconds(span: SpanRecord) -> float:
    return (span[2] - span[1]) / 1e9


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else 0.0
