"""Recorder of a simulated run: computes the lag of every trained token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from midflight.sim.simulator.engines import SimEngine, SimRollout
from midflight.sim.simulator.result import NUM_POSITIONS, SimulationResult, Snapshot, TrainedBatch
from midflight.types import ActorState, Float64Array, Int64Array


class BatchRecorder:
    """Collects updates, interruptions and batches; a batch is recorded when its training starts."""

    def __init__(self, engines: Sequence[SimEngine], max_length: int) -> None:
        self._engines = engines
        self._positions = ((np.arange(NUM_POSITIONS) + 0.5) / NUM_POSITIONS * max_length).astype(np.int64)
        self._versions = [0]  # weight version after 0, 1, ... updates
        self._batches: list[TrainedBatch] = []
        self._num_interrupted = self._interrupted_tokens = self._interrupted_new_tokens = 0

    @property
    def num_updates(self) -> int:
        return len(self._versions) - 1

    def updated(self, version: int) -> None:
        self._versions.append(version)

    def interrupted(self, rollouts: Sequence[SimRollout]) -> None:
        self._num_interrupted += len(rollouts)
        self._interrupted_tokens += sum(rollout.num_tokens for rollout in rollouts)
        self._interrupted_new_tokens += sum(rollout.segments[-1].num_tokens for rollout in rollouts if rollout.segments)

    def read(self, time: float, state: ActorState, discarded_tokens: int) -> Snapshot:
        return Snapshot(
            time,
            sum(engine.generated_by(time) for engine in self._engines),
            sum(engine.busy_time for engine in self._engines),
            state.num_filtered_groups,
            state.num_dropped_groups,
            discarded_tokens,
            self._num_interrupted,
            self._interrupted_tokens,
            self._interrupted_new_tokens,
        )

    def trained(self, rollouts: Sequence[SimRollout], handed_over: Snapshot, start: float, end: float) -> None:
        """Record the next batch, whose training lasts from `start` to `end`."""
        version = len(self._batches)
        segments = np.array([segment for rollout in rollouts for segment in rollout.segments], np.int64)
        first_of = np.cumsum([0, *(len(rollout.segments) for rollout in rollouts)])
        ages = _SegmentAges(self._engines, segments, np.array(self._versions), version)
        position_lags, position_counts = ages.at(self._positions)
        self._batches.append(
            TrainedBatch(
                index=version,
                handed_over=handed_over,
                start=start,
                end=end,
                rollout_ids=np.array([rollout.rollout_id for rollout in rollouts]),
                group_ids=np.array([rollout.group_id for rollout in rollouts]),
                lengths=np.array([rollout.length for rollout in rollouts]),
                first_lags=ages.first()[first_of[:-1]],
                last_lags=ages.last()[first_of[1:] - 1],
                lag_histogram=ages.histogram(),
                position_lags=position_lags,
                position_counts=position_counts,
                carried_tokens=sum(rollout.num_carried for rollout in rollouts),
                num_versions=np.array([rollout.num_versions for rollout in rollouts]),
            )
        )

    def result(self, num_steps: int) -> SimulationResult:
        """Return the result of the first `num_steps` batches; training on one more may have begun."""
        return SimulationResult(self._batches[:num_steps], len(self._engines))


class _SegmentAges:
    """Lags of the tokens in `segments`, for a batch that trains weights of version `version`.

    Shapes: `segments` [S, 5], one Segment per row; `versions` [U + 1], the weight version after 0, 1, ... U updates.
    """

    def __init__(self, engines: Sequence[SimEngine], segments: Int64Array, versions: Int64Array, version: int) -> None:
        engine, self._start, self._num_tokens, first_update, self._offset = segments.T
        self._lags = version - versions
        self._first = int(first_update.min())
        # One sorted array for all engines: the update steps of each engine are shifted to a range of their own.
        indices, self._row = np.unique(engine, return_inverse=True)
        steps = [engines[index].update_steps[self._first :] for index in indices]
        self._stride = 1 + max(engines[index].step for index in indices) + max(max(row, default=0) for row in steps)
        self._width = len(steps[0])
        self._update_steps = np.array(steps, np.int64).reshape(len(indices), self._width)
        self._sorted = (self._update_steps + self._stride * np.arange(len(indices))[:, None]).ravel()

    def _lag_at(self, row: Int64Array, step: Int64Array) -> Int64Array:
        num_before = np.searchsorted(self._sorted, row * self._stride + step, side="right") - row * self._width
        lags: Int64Array = self._lags[self._first + num_before]
        return lags

    def first(self) -> Int64Array:
        """Lag of each segment's first token, `[S]`."""
        return self._lag_at(self._row, self._start)

    def last(self) -> Int64Array:
        """Lag of each segment's last token, `[S]`."""
        return self._lag_at(self._row, self._start + self._num_tokens - 1)

    def histogram(self) -> dict[int, int]:
        """Number of tokens by lag."""
        start, num_tokens = self._start, self._num_tokens
        ends = (start + num_tokens)[:, None]
        edges = np.clip(self._update_steps[self._row], start[:, None], ends)
        edges = np.concatenate([start[:, None], edges, ends], axis=1)
        counts = np.diff(edges, axis=1).sum(axis=0)
        histogram: dict[int, int] = {}
        for lag, count in zip(self._lags[self._first :].tolist(), counts.tolist(), strict=True):
            if count:
                histogram[lag] = histogram.get(lag, 0) + count
        return histogram

    def at(self, positions: Int64Array) -> tuple[Float64Array, Int64Array]:
        """Return the sums of lags and the numbers of rollouts at these positions of a response, both `[P]`."""
        offset, start = self._offset[:, None], self._start[:, None]
        inside = positions - offset
        is_there = (inside >= 0) & (inside < self._num_tokens[:, None])
        segment, position = np.nonzero(is_there)
        lags = self._lag_at(self._row[segment], (start + inside)[segment, position])
        num_positions = len(positions)
        sums = np.bincount(position, weights=lags, minlength=num_positions).astype(np.float64)
        return sums, np.bincount(position, minlength=num_positions).astype(np.int64)
