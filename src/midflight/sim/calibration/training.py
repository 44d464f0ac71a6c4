"""What an optimizer step costs, and what else takes time between generating and training, from what real runs wrote."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from midflight.errors import BenchmarkError
from midflight.metrics.jsonl import MetricsLine
from midflight.tracing.spans import SpanRecord


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Seconds of the whole trainer. Tokens are response tokens that something is computed for."""

    time_per_step: float
    time_per_token: float
    without_gradient_fraction: float  # of the trained tokens: those in groups that have nothing to teach


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds, as in a scenario."""

    transfer: float = 0.0
    preprocess: float = 0.0
    update_pause: float = 0.0
    handover_pause: float = 0.0


def fit_training(lines: Sequence[MetricsLine]) -> TrainingCost:
    """Busy seconds of the steps against their tokens, by least squares; the sum of all steps is kept.

    Raises: BenchmarkError if there are too few steps.
    """
    if len(lines) < 2:
        raise BenchmarkError(f"the run took only {len(lines)} optimizer steps, which is not enough to measure them")
    computed = np.array([_computed_tokens(line) for line in lines], np.float64)
    busy = np.array([line["time/step_s"] * (1 - line["idle/trainer_fraction"]) for line in lines])
    num_trained = sum(sum(line["length/by_rollout"]) for line in lines)
    per_token = _slope(computed, busy)
    return TrainingCost(
        time_per_step=float(busy.mean() - per_token * computed.mean()),
        time_per_token=per_token,
        without_gradient_fraction=float(np.clip(1 - computed.sum() / num_trained, 0.0, 1.0)),
    )


def split_delays(
    rollout: Sequence[SpanRecord], trainer: Sequence[SpanRecord], lines: Sequence[MetricsLine], mean_turn_s: float
) -> Delays:
    """Of a run whose phases go on at the same time.

    New weights are seen at the start of a turn, half a turn late on average: that is no delay of the weights.
    """
    handovers = {span[3]["batch"]: span for span in rollout if span[0] == "preprocess"}
    return Delays(
        transfer=max(0.0, _adoption_s(rollout, trainer) - _bookkeeping_s(trainer, lines) - mean_turn_s / 2),
        preprocess=_grading_s(lines) + _preprocess_s(handovers, trainer),
        update_pause=_mean(_seconds(span) for span in rollout if span[0] == "update"),
        handover_pause=_mean(map(_seconds, handovers.values())),
    )


def colocated_delays(
    rollout: Sequence[SpanRecord], trainer: Sequence[SpanRecord], lines: Sequence[MetricsLine]
) -> Delays:
    """Of a run whose phases take turns: from the last token to the first step, and from the last step to a token."""
    decodes = [("decode", span[1], span[2]) for span in rollout if span[0] == "decode" and span[3]["rows"]]
    trains = [("train", span[1], span[2]) for span in trainer if span[0] in ("train", "publish")]
    phases = sorted([*decodes, *trains], key=lambda phase: phase[1])
    gaps: dict[str, list[float]] = {"decode": [], "train": []}
    for before, after in itertools.pairwise(phases):
        if before[0] != after[0]:
            gaps[before[0]].append((after[1] - before[2]) / 1e9)
    return Delays(
        transfer=max(0.0, _mean(gaps["train"]) - _bookkeeping_s(trainer, lines)),
        preprocess=max(0.0, _mean(gaps["decode"])),
    )


def _computed_tokens(line: MetricsLine) -> int:
    """Those that carried loss in a forward pass; groups without a gradient are left out of it."""
    return sum(line.get("lag/tokens_by_lag", ()))


def _slope(positions: np.ndarray, values: np.ndarray) -> float:
    """Of a line whose two coefficients are both at least 0."""
    centered = positions - positions.mean()
    spread = float(centered @ centered)
    slope = float(centered @ values) / spread if spread else 0.0
    through_zero = float(values.mean() / positions.mean()) if positions.any() else 0.0
    return min(max(slope, 0.0), through_zero)


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
    busy = _mean(line["time/step_s"] * (1 - line["idle/trainer_fraction"]) for line in lines)
    spans = [span for span in trainer if span[0] in ("train", "publish")]
    num_steps = sum(span[0] == "train" for span in spans)
    return max(0.0, busy - sum(map(_seconds, spans)) / max(num_steps, 1))


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


def _seconds(span: SpanRecord) -> float:
    return (span[2] - span[1]) / 1e9


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else 0.0
