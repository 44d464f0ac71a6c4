"""Costs of this machine in seconds, from the metrics and spans of short real runs.

An iteration of the rollout loop spans the time between the starts of two decode steps. It contains the step, which
also prefills newly admitted rollouts, the exchange of responses and grades, and saving. Weight updates and handovers
of batches count as delays.
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
from midflight.experiments.runs import NO_EVALUATION, Report, RunLength, train
from midflight.launch.build import recipe_schedule
from midflight.metrics.jsonl import MetricsLine, read_metrics
from midflight.run.roles import trainer_role
from midflight.tracing.reading import read_spans
from midflight.tracing.spans import SpanRecord
from midflight.types import Float64Array

_SHORT = 1 / 8  # length of runs that only add sizes to a table, as a share of a long run
_FEW_IN_FLIGHT = (4, 16)
_STEPS_PER_RL_STEP = 4
_NUM_WARM_UP_STEPS = 3
_COUNTED_ELSEWHERE = ("update", "hand_over")
_IDLE = ("wait", "grade")
_MIN_ITERATIONS = 20  # iterations near a size that a fit of its time needs


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One calibration run. A long one has the full length, so that the policy learns as in the runs to be predicted."""

    name: str
    colocated: bool
    is_long: bool
    overrides: tuple[str, ...]  # of the recipe's schedule


@dataclass(frozen=True, slots=True)
class Iteration:
    num_seqs: int  # sequences in flight
    seconds: float
    num_new: int = 0  # more sequences than in the iteration before


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Metrics and spans of a run; spans leave out the first optimizer steps, which are slow."""

    plan: PlannedRun
    all_lines: list[MetricsLine]
    rollout: list[SpanRecord]
    trainer: list[SpanRecord]
    iterations: list[Iteration]

    @property
    def lines(self) -> list[MetricsLine]:
        return self.all_lines[_NUM_WARM_UP_STEPS:]

    def by_rollout(self, key: str) -> list[int]:
        """Return `key/by_rollout` of all trained rollouts from the first step on, siblings side by side."""
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
    """Return two long runs, one with overlapping phases and one with phases in turns, and several short runs.

    One of the long runs has the recipe's own schedule. Short runs add other numbers of sequences in flight; if their
    phases overlap, a full queue drops the oldest rollouts, as generation would otherwise wait for training.
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
    """Record all runs, each in its own directory in `out`, and leave out short runs that measured too little.

    `seconds`: duration of a long run.
    Raises: WorkerError if a run fails; BenchmarkError if a long run is too short to measure.
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
    """Record one run. Raises: WorkerError if it fails; BenchmarkError if it is too short to measure."""
    settings = [*RunLength(seconds=seconds).overrides, "trainer.checkpoint_every=1000000000", *NO_EVALUATION]
    summary = train(recipe_path, directory, [*overrides, *plan.overrides, *settings])
    run = RunDirectory(directory)
    lines = read_metrics(run.metrics)
    if len(lines) < 2 * _NUM_WARM_UP_STEPS:
        raise BenchmarkError(
            f"the run {plan.name} made {len(lines)} optimizer steps in {seconds:g} s, which is not enough to measure;"
            " use a longer --seconds"
        )
    rollout, trainer = read_spans(run.spans("rollout")), read_spans(run.spans(trainer_role(0)))
    start_ns = [span for span in trainer if span[0] == "publish"][_NUM_WARM_UP_STEPS - 1][2]
    after_warm_up = [span for span in rollout if span[1] >= start_ns]
    iterations = iterations_of(after_warm_up, slots_per_token(rollout, summary["generated_tokens"]))
    return RecordedRun(plan, lines, after_warm_up, [span for span in trainer if span[1] >= start_ns], iterations)


def iterations_of(spans: Sequence[SpanRecord], slots_per_token: float = 1.0) -> list[Iteration]:
    """Return all iterations but the last, from the spans of a rollout process in order.

    An iteration that ends in waiting consists of its decode step alone. Seconds are multiplied by `slots_per_token`, as
    if each slot sampled a token.
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
        if num_seqs:  # 0: a step that only continued an update
            iterations.append(Iteration(num_seqs, (end - start) / 1e9 * slots_per_token, max(0, num_seqs - num_before)))
        num_before = num_seqs
    return iterations


def slots_per_token(spans: Sequence[SpanRecord], num_tokens: int) -> float:
    """Slots in use per sampled token, over a whole run: a slot samples no token while its prompt is prefilled."""
    num_seqs: int = sum(span[3]["num_seqs"] for span in spans if span[0] == "decode")
    return max(1.0, num_seqs / max(num_tokens, 1))


def fit_table(
    iterations: Sequence[Iteration], mean_length: float | None = None, num_devices: int = 1
) -> TableDecodeConfig:
    """Fit t(h), linear between powers of two, by least squares; the sum of all iterations is kept.

    With `mean_length` (mean tokens of a response), the cost of admitting a sequence is fitted as well and spread over
    the tokens of its response. Otherwise, a phase that admits all sequences at its start would make full batches look
    slow. Times and rates of a table must not decrease with size: where noise makes them decrease, the larger size
    takes the value of the smaller size.
    Raises: BenchmarkError if there are too few iterations.
    """
    rows = np.array([iteration.num_seqs for iteration in iterations], np.float64)
    seconds = np.array([iteration.seconds for iteration in iterations])
    sizes = _sizes(rows)
    if not len(sizes):
        raise BenchmarkError(
            f"the run took only {len(iterations)} decode steps, which is not enough to measure them; use a longer run"
        )
    columns = _hats(rows, sizes)
    if mean_length is None:
        times, *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    else:
        num_new = np.array([iteration.num_new for iteration in iterations], np.float64)
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
    """Fit the busy seconds of optimizer steps to their tokens, by least squares; the sum of all steps is kept.

    Only tokens with a loss in a forward pass count: groups without a gradient need no forward pass.
    Raises: BenchmarkError if there are too few steps.
    """
    if len(lines) < 2:
        raise BenchmarkError(
            f"the run took only {len(lines)} optimizer steps, which is not enough to measure them; use a longer run"
        )
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
    """Measure the delays of a run whose phases overlap.

    The rollout loop sees new weights at the start of an iteration, half an iteration late on average. This wait is not
    counted as a delay of the weights.
    """
    handovers = {span[3]["batch"]: span for span in rollout if span[0] == "hand_over"}
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
    """Measure the delays of a run in turns: last token to first optimizer step, and last step to next token."""
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
    """Overrides that reset the schedule to the defaults of `kind`: a change of type discards the recipe's keys."""
    other = "pipeline" if kind == "conventional" else "conventional"
    return (f"schedule.type={other}", f"schedule.type={kind}")


def _sizes(rows: Float64Array) -> Float64Array:
    """Sizes to fit: powers of two up to the largest row, and that row, each with enough iterations near it."""
    if not len(rows):
        return rows
    largest = int(rows.max())
    sizes = np.array(sorted({largest, *(1 << power for power in range(largest.bit_length()))}), np.float64)
    while len(sizes) and (counts := _hats(rows, sizes).sum(axis=0)).min() < _MIN_ITERATIONS:
        sizes = np.delete(sizes, counts.argmin())
    return sizes


def _hats(rows: Float64Array, sizes: Float64Array) -> Float64Array:
    """Weights of linear interpolation, `[iterations, sizes]`: share of each iteration per size; rows add up to 1."""
    return np.column_stack([np.interp(rows, sizes, unit) for unit in np.eye(len(sizes))])


def _adoption_s(rollout: Sequence[SpanRecord], trainer: Sequence[SpanRecord]) -> float:
    """Mean time from the publication of weights to the start of the engine's update (seconds)."""
    published = np.array([span[2] for span in trainer if span[0] == "publish"], np.float64)
    updates = np.array([span[1] for span in rollout if span[0] == "update"], np.float64)
    newest = np.searchsorted(published, updates, side="right") - 1
    first_uses = np.unique(newest[newest >= 0], return_index=True)[1]
    waits = (updates[newest >= 0] - published[newest[newest >= 0]])[first_uses]
    return float(waits.mean()) / 1e9 if len(waits) else 0.0


def _bookkeeping_s(trainer: Sequence[SpanRecord], lines: Sequence[MetricsLine]) -> float:
    """Mean time that the trainer stays busy with a step after it has published its weights (seconds)."""
    spans = [span for span in trainer if span[0] in ("train", "publish")]
    num_steps = sum(span[0] == "train" for span in spans)
    return max(0.0, _mean(map(_busy_s, lines)) - sum(map(_seconds, spans)) / max(num_steps, 1))


def _grading_s(lines: Sequence[MetricsLine]) -> float:
    """Mean time from a response's end to its grade (seconds): waiting rollouts / rollouts per second (Little's law)."""
    num_ended = sum(len(line["length/by_rollout"]) for line in lines)
    seconds = sum(line["time/step_s"] for line in lines)
    num_waiting = _mean(line["queue/ungraded_rollouts"] for line in lines)
    return num_waiting * seconds / num_ended if num_ended else 0.0


def _preprocess_s(handovers: dict[int, SpanRecord], trainer: Sequence[SpanRecord]) -> float:
    """Mean time from a batch's handover to its optimizer step, if the trainer was waiting for the batch (seconds)."""
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
