"""What APRIL is compared with under dynamic sampling: iterations that leave nothing to the next one.

A batch of groups is started and waited for. Once fewer are left than a batch needs, as some were filtered, another
batch of groups is started. What is not needed when the batch is complete is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from midflight.schedules.april import AprilSchedule
from midflight.sim.simulator.result import TrainedBatch
from midflight.sim.simulator.simulation import SimulatedRun, simulate
from midflight.types import FleetView


@dataclass(frozen=True, slots=True)
class FromScratch:
    """Iterations that know nothing of each other. Rates are tokens per unit of time."""

    batches: list[TrainedBatch]

    @property
    def time(self) -> float:
        """Of generation; training comes after it."""
        return sum(batch.handed_over.time for batch in self.batches)

    @property
    def rate(self) -> float:
        """Of tokens that are trained on."""
        return sum(batch.num_tokens for batch in self.batches) / self.time

    @property
    def generated_rate(self) -> float:
        return sum(batch.handed_over.generated_tokens for batch in self.batches) / self.time

    @property
    def thrown_away_fraction(self) -> float:
        """Of generated tokens, those neither trained on nor filtered."""
        filtered = sum(batch.handed_over.discarded_tokens for batch in self.batches) / self.time
        return 1 - (self.rate + filtered) / self.generated_rate


def restart_baseline(run: SimulatedRun, seeds: Iterable[int]) -> FromScratch:
    """One iteration for each seed; of `run`, its schedule, number of steps and seed do not matter."""
    alone = replace(run, schedule=_Waiting(run.batch_size, run.group_size, over_sampling=1.0), num_steps=1)
    return FromScratch([simulate(replace(alone, seed=seed)).batches[0] for seed in seeds])


@dataclass(frozen=True, slots=True)
class _Waiting(AprilSchedule):
    """APRIL without over-sampling, but for what takes the place of groups that are filtered: a batch at a time."""

    def num_to_admit(self, fleet: FleetView) -> int:
        live = fleet.num_started - fleet.num_batches * self.batch_size
        return self.num_held if fleet.num_batches == fleet.version and live < self.batch_size else 0
