"""What a simulated run is like: per optimizer step, and over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from midflight.metrics.lag import lag_metrics, merge_histograms
from midflight.sim.actor import GroupCounts
from midflight.sim.engines import Engine, SimRollout
from midflight.types import Float64Array, Int64Array

NUM_POSITIONS = 20  # where in the longest response the lag is looked at: the middles of so many parts


class Reading(NamedTuple):
    """Running totals at one time."""

    time: float
    generated_tokens: int
    busy_time: float  # of all engines together
    num_filtered_groups: int
    num_dropped_groups: int
    discarded_tokens: int  # in filtered and dropped groups
    num_interrupted: int  # rollouts
    interrupted_tokens: int  # those they had when they were interrupted
    interrupted_new_tokens: int  # of those, the ones sampled since they were last started


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Batch `index`, which weights of that version were trained on. Lags in optimizer steps, lengths in tokens."""

    index: int
    handed_over: Reading
    start: float
    end: float
    rollout_ids: Int64Array  # [B]
    group_ids: Int64Array  # [B]
    lengths: Int64Array  # [B]
    first_lags: Int64Array  # [B] of the first token of each
    last_lags: Int64Array  # [B]
    lag_histogram: dict[int, int]  # lag -> tokens
    position_lags: Float64Array  # [NUM_POSITIONS] sums over the rollouts that are so long
    position_counts: Int64Array  # [NUM_POSITIONS] how many are
    carried_tokens: int  # those of rollouts that were interrupted, from before the last time
    num_versions: Int64Array  # [B] of the weights that sampled each

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def mean_lag(self) -> float:
        return sum(lag * count for lag, count in self.lag_histogram.items()) / self.num_tokens

    @property
    def max_lag(self) -> int:
        return max(self.lag_histogram)

    @property
    def old_tokens(self) -> int:
        """Sampled by weights that were older than those that are trained."""
        return self.num_tokens - self.lag_histogram.get(0, 0)


class BatchRecorder:
    """Follows a run and works out the lag of every token that is trained on."""

    def __init__(self, engines: Sequence[Engine], max_length: int) -> None:
        self._engines = engines
        self._positions = ((np.arange(NUM_POSITIONS) + 0.5) / NUM_POSITIONS * max_length).astype(np.int64)
        self._versions = [0]  # after so many updates
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

    def read(self, time: float, counts: GroupCounts) -> Reading:
        return Reading(
            time,
            sum(engine.generated_by(time) for engine in self._engines),
            sum(engine.busy_time for engine in self._engines),
            counts.num_filtered,
            counts.num_dropped,
            counts.filtered_tokens + counts.dropped_tokens,
            self._num_interrupted,
            self._interrupted_tokens,
            self._interrupted_new_tokens,
        )

    def trained(self, rollouts: Sequence[SimRollout], handed_over: Reading, start: float, end: float) -> None:
        """The next batch."""
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

    def outcome(self, num_steps: int, counts: GroupCounts) -> Outcome:
        """Of the first `num_steps` batches: training on another may have begun."""
        return Outcome(self._batches[:num_steps], counts, len(self._engines))


class _SegmentAges:
    """The lag of each token of some segments, in a batch that weights of version `version` are trained on.

    Shapes: `segments` [S, 5], one Segment each; `versions` [U + 1], those in use after 0, 1, ... U updates.
    """

    def __init__(self, engines: Sequence[Engine], segments: Int64Array, versions: Int64Array, version: int) -> None:
        engine, self._start, self._num_tokens, first_update, self._offset = segments.T
        self._lags = version - versions
        self._first = int(first_update.min())
        # One sorted array for all engines: each one's update steps lie in a range of their own.
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
        """Of each segment's first token, `[S]`."""
        return self._lag_at(self._row, self._start)

    def last(self) -> Int64Array:
        return self._lag_at(self._row, self._start + self._num_tokens - 1)

    def histogram(self) -> dict[int, int]:
        """Tokens by lag."""
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
        """Sums of lags and numbers of rollouts at these positions of a response, `[P]` both."""
        offset, start = self._offset[:, None], self._start[:, None]
        inside = positions - offset
        is_there = (inside >= 0) & (inside < self._num_tokens[:, None])
        segment, position = np.nonzero(is_there)
        lags = self._lag_at(self._row[segment], (start + inside)[segment, position])
        num_positions = len(positions)
        sums = np.bincount(position, weights=lags, minlength=num_positions).astype(np.float64)
        return sums, np.bincount(position, minlength=num_positions).astype(np.int64)


@dataclass(frozen=True)
class Outcome:
    """Every batch of a run, and what was not trained on. Figures leave out the first `num_warm_up_steps` batches."""

    batches: list[TrainedBatch]
    counts: GroupCounts
    num_engines: int
    num_warm_up_steps: int = 0

    @cached_property
    def measured(self) -> list[TrainedBatch]:
        return self.batches[self.num_warm_up_steps :]

    def after(self, num_warm_up_steps: int) -> Outcome:
        """The same run with another warm-up."""
        return Outcome(self.batches, self.counts, self.num_engines, num_warm_up_steps)

    @property
    def start(self) -> float:
        """The end of the warm-up."""
        return self.batches[self.num_warm_up_steps - 1].end if self.num_warm_up_steps else 0.0

    @property
    def elapsed(self) -> float:
        return self.batches[-1].end - self.start

    @property
    def rate(self) -> float:
        """Trained tokens per unit of time."""
        return sum(batch.num_tokens for batch in self.measured) / self.elapsed

    @property
    def generated_rate(self) -> float:
        """Sampled tokens per unit of time, also those that are discarded."""
        return self._since.generated_tokens / self._since.time

    @property
    def trainer_share(self) -> float:
        """Of the time, that the trainer is busy."""
        return sum(batch.end - batch.start for batch in self.measured) / self.elapsed

    @property
    def lag_histogram(self) -> dict[int, int]:
        return merge_histograms(batch.lag_histogram for batch in self.measured)

    @property
    def mean_lags(self) -> Float64Array:
        """Of each batch, optimizer steps."""
        return np.array([batch.mean_lag for batch in self.measured])

    @property
    def max_lags(self) -> Int64Array:
        return np.array([batch.max_lag for batch in self.measured])

    @property
    def lag_by_position(self) -> Float64Array:
        """Mean lag at the middles of `NUM_POSITIONS` parts of the longest response; NaN where none is so long."""
        sums = np.sum([batch.position_lags for batch in self.measured], axis=0)
        counts = np.sum([batch.position_counts for batch in self.measured], axis=0)
        means: Float64Array = np.divide(sums, counts, out=np.full(NUM_POSITIONS, np.nan), where=counts > 0)
        return means

    @property
    def last_lag(self) -> float:
        """Of a rollout's last token, the mean over rollouts."""
        return float(np.mean(np.concatenate([batch.last_lags for batch in self.measured])))

    @property
    def num_versions(self) -> Int64Array:
        """Of the weights that sampled each rollout."""
        return np.concatenate([batch.num_versions for batch in self.measured])

    @property
    def carried_in_fraction(self) -> float:
        """Of the tokens that iterations begin with or sample, those they begin with, in unfinished rollouts."""
        since = self._since
        return since.interrupted_tokens / (since.interrupted_tokens + since.generated_tokens)

    @property
    def carried_once_fraction(self) -> float:
        """The same, counting only what such rollouts sampled in the iteration before."""
        since = self._since
        return since.interrupted_new_tokens / (since.interrupted_new_tokens + since.generated_tokens)

    @property
    def _since(self) -> Reading:
        """From the last batch of the warm-up to the last of all, handed over each."""
        last = self.batches[-1].handed_over
        if not self.num_warm_up_steps:
            return last
        first = self.batches[self.num_warm_up_steps - 1].handed_over
        return Reading._make(after - before for before, after in zip(first, last, strict=True))

    def figures(self) -> dict[str, object]:
        """The whole run in one object; what real runs log is under the same name."""
        measured, since = self.measured, self._since
        num_tokens = sum(batch.num_tokens for batch in measured)
        return {
            "steps": len(measured),
            "time": self.elapsed,
            "trained_tokens": num_tokens,
            "generated_tokens": since.generated_tokens,
            "throughput/trained_tokens": self.rate,
            "throughput/generated_tokens": self.generated_rate,
            "idle/trainer_fraction": 1.0 - self.trainer_share,
            "idle/generation_fraction": max(0.0, 1.0 - since.busy_time / (since.time * self.num_engines)),
            **lag_metrics(self.lag_histogram),
            "lag/max_of_batch_median": float(np.median(self.max_lags)),
            "lag/mean_of_batch_std": float(self.mean_lags.std()),
            "lag/last_token": self.last_lag,
            "lag/by_position": self.lag_by_position.tolist(),
            "versions_per_rollout/max": int(self.num_versions.max()),
            "carried_token_fraction": sum(batch.carried_tokens for batch in measured) / num_tokens,
            "carried_in_fraction": self.carried_in_fraction,
            "carried_once_fraction": self.carried_once_fraction,
            "discarded_token_fraction": since.discarded_tokens / since.generated_tokens,
            "dropped/filtered_groups": since.num_filtered_groups,
            "dropped/queue_full_groups": since.num_dropped_groups,
        }
