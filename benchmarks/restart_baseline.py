"""Restart baseline for APRIL under dynamic sampling: iterations that leave nothing to the next iteration.

An iteration starts a batch of groups and waits for them. If filtering leaves fewer groups than a batch needs, the
iteration starts another batch of groups. Rollouts that are not needed once the batch is complete are discarded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from midflight.schedules.april import AprilSchedule
from midflight.sim.simulator.result import TrainedBatch
from midflight.sim.simulator.simulation import SimulatedRun, simulate
from midflight.types import FleetView


@dataclass(frozen=True, slots=True)
class RestartBaseline:
    """Independent iterations. Rates are in tokens per unit of time."""

    batches: list[TrainedBatch]

    @property
    def time(self) -> float:
        """Total time of generation; training comes after it."""
        return sum(batch.handed_over.time for batch in self.batches)

    @property
    def rate(self) -> float:
        """Rate of trained tokens."""
        return sum(batch.num_tokens for batch in self.batches) / self.time

    @property
    def generated_rate(self) -> float:
        return sum(batch.handed_over.generated_tokens for batch in self.batches) / self.time

    @property
    def thrown_away_fraction(self) -> float:
        """Share of generated tokens that are neither trained nor filtered."""
        filtered = sum(batch.handed_over.discarded_tokens for batch in self.batches) / self.time
        return 1 - (self.rate + filtered) / self.generated_rate


def restart_baseline(run: SimulatedRun, seeds: Iterable[int]) -> RestartBaseline:
    """Simulate one iteration per seed; the schedule, number of steps and seed of `run` are ignored."""
    alone = replace(run, schedule=_Waiting(run.batch_size, run.group_size, over_sampling=1.0), num_steps=1)
    return RestartBaseline([simulate(replace(alone, seed=seed)).batches[0] for seed in seeds])


@dataclass(frozen=True, slots=True)
class _Waiting(AprilSchedule):
    """APRIL without over-sampling, which replaces filtered groups by a whole batch of groups at a time."""

    def num_to_admit(self, fleet: FleetView) -> int:
        live = fleet.num_started - fleet.num_batches * self.batch_size
        return self.num_held if fleet.num_batches == fleet.version and live < self.batch_size else 0
