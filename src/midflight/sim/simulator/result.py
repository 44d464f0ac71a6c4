"""What a simulated run is like: per optimizer step, and over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from midflight.metrics.lag import lag_metrics, merge_histograms
from midflight.types import Float64Array, Int64Array

NUM_POSITIONS = 20  # where in the longest response the lag is looked at: the middles of so many parts


class Snapshot(NamedTuple):
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
    handed_over: Snapshot
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


@dataclass(frozen=True)
class SimulationResult:
    """Every batch of a run. Figures leave out the first `num_warm_up_steps` batches."""

    batches: list[TrainedBatch]
    num_engines: int
    num_warm_up_steps: int = 0

    @cached_property
    def measured(self) -> list[TrainedBatch]:
        return self.batches[self.num_warm_up_steps :]

    def after(self, num_warm_up_steps: int) -> SimulationResult:
        """The same run with another warm-up."""
        return SimulationResult(self.batches, self.num_engines, num_warm_up_steps)

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
    def _since(self) -> Snapshot:
        """From the last batch of the warm-up to the last of all, handed over each."""
        last = self.batches[-1].handed_over
        if not self.num_warm_up_steps:
            return last
        first = self.batches[self.num_warm_up_steps - 1].handed_over
        return Snapshot._make(after - before for before, after in zip(first, last, strict=True))

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
