"""Result of a simulated run: figures per optimizer step and for the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from midflight.metrics.lag import lag_metrics, merge_histograms
from midflight.types import Float64Array, Int64Array

NUM_POSITIONS = 20  # the lag is read at the middles of this number of equal parts of the longest response


class Snapshot(NamedTuple):
    """Running totals at one point in time."""

    time: float
    generated_tokens: int
    busy_time: float  # of all engines together
    num_filtered_groups: int
    num_dropped_groups: int
    discarded_tokens: int  # in filtered and dropped groups
    num_interrupted: int  # rollouts
    interrupted_tokens: int  # tokens of these rollouts at their interruptions
    interrupted_new_tokens: int  # part of interrupted_tokens that was sampled since the last start


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Batch `index`, which trained weights of version `index`. Lags in optimizer steps, lengths in tokens."""

    index: int
    handed_over: Snapshot
    start: float
    end: float
    rollout_ids: Int64Array  # [B]
    group_ids: Int64Array  # [B]
    lengths: Int64Array  # [B]
    first_lags: Int64Array  # [B] lag of each first token
    last_lags: Int64Array  # [B] lag of each last token
    lag_histogram: dict[int, int]  # lag -> tokens
    position_lags: Float64Array  # [NUM_POSITIONS] sums over the rollouts that reach the position
    position_counts: Int64Array  # [NUM_POSITIONS] number of these rollouts
    carried_tokens: int  # tokens of interrupted rollouts from before their last interruption
    num_versions: Int64Array  # [B] weight versions that sampled each rollout

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
    """All batches of a run. Figures leave out the first `num_warm_up_steps` batches."""

    batches: list[TrainedBatch]
    num_engines: int
    num_warm_up_steps: int = 0

    @cached_property
    def measured(self) -> list[TrainedBatch]:
        return self.batches[self.num_warm_up_steps :]

    def after(self, num_warm_up_steps: int) -> SimulationResult:
        """Return the same run with another warm-up."""
        return SimulationResult(self.batches, self.num_engines, num_warm_up_steps)

    @property
    def start(self) -> float:
        """Time at which the warm-up ends."""
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
        """Sampled tokens per unit of time, including discarded tokens."""
        return self._since.generated_tokens / self._since.time

    @property
    def trainer_share(self) -> float:
        """Share of the time in which the trainer is busy."""
        return sum(batch.end - batch.start for batch in self.measured) / self.elapsed

    @property
    def lag_histogram(self) -> dict[int, int]:
        return merge_histograms(batch.lag_histogram for batch in self.measured)

    @property
    def mean_lags(self) -> Float64Array:
        """Mean lag of each batch (optimizer steps)."""
        return np.array([batch.mean_lag for batch in self.measured])

    @property
    def max_lags(self) -> Int64Array:
        return np.array([batch.max_lag for batch in self.measured])

    @property
    def lag_by_position(self) -> Float64Array:
        """Mean lag at the middles of `NUM_POSITIONS` parts of the longest response; NaN where no rollout is so long."""
        sums = np.sum([batch.position_lags for batch in self.measured], axis=0)
        counts = np.sum([batch.position_counts for batch in self.measured], axis=0)
        means: Float64Array = np.divide(sums, counts, out=np.full(NUM_POSITIONS, np.nan), where=counts > 0)
        return means

    @property
    def last_lag(self) -> float:
        """Mean lag of a rollout's last token (optimizer steps)."""
        return float(np.mean(np.concatenate([batch.last_lags for batch in self.measured])))

    @property
    def num_versions(self) -> Int64Array:
        """Number of weight versions that sampled each rollout."""
        return np.concatenate([batch.num_versions for batch in self.measured])

    @property
    def carried_in_fraction(self) -> float:
        """Tokens of unfinished rollouts at the start of an iteration, as a share of these and the tokens it samples."""
        since = self._since
        return since.interrupted_tokens / (since.interrupted_tokens + since.generated_tokens)

    @property
    def carried_once_fraction(self) -> float:
        """The same share, counting only the tokens that the iteration before sampled."""
        since = self._since
        return since.interrupted_new_tokens / (since.interrupted_new_tokens + since.generated_tokens)

    @property
    def _since(self) -> Snapshot:
        """Difference of the totals between two handovers: the last batch of the warm-up and the last batch."""
        last = self.batches[-1].handed_over
        if not self.num_warm_up_steps:
            return last
        first = self.batches[self.num_warm_up_steps - 1].handed_over
        return Snapshot._make(after - before for before, after in zip(first, last, strict=True))

    def figures(self) -> dict[str, object]:
        """All figures of the run in one object; a metric that real runs log has the same name here."""
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
