"""Asynchronous RL with a bounded lag: generation runs ahead of training by at most `max_lag` optimizer steps.

`schedules/pipeline.py` proves the bound: rollouts are admitted while fewer than (version + max_lag + 1) * batch_size
are started, and batches are taken in start order.

New weights are adopted in flight, or at the boundary between two batches. At the boundary, a whole batch is generated
by one version; with `max_lag` = 1 this is one-step-off-policy RL: batch k + 1 is generated while the trainer works on
batch k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from midflight.schedules.batches import num_startable, take_in_start_order
from midflight.types import BatchChoice, FleetView, ReadyGroup


@dataclass(frozen=True, slots=True)
class BoundedSchedule:
    """Generation at most `max_lag` optimizer steps ahead of training."""

    batch_size: int  # rollouts
    max_lag: int  # optimizer steps
    updates: Literal["in_flight", "boundary"] = "in_flight"
    num_in_flight: int | None = None  # rollouts at a time; None: as many as the bound allows
    colocated: bool = False

    @property
    def max_in_flight(self) -> int:
        num_batches = 1 if self.updates == "boundary" else self.max_lag + 1
        return self.num_in_flight or num_batches * self.batch_size

    def num_to_admit(self, fleet: FleetView) -> int:
        free = min(num_startable(fleet, self.batch_size, self.max_lag), self.max_in_flight - fleet.num_in_flight)
        if self.updates == "boundary":
            end_of_batch = (fleet.num_finished // self.batch_size + 1) * self.batch_size
            free = min(free, end_of_batch - fleet.num_started)
        return max(0, free)

    def should_abort(self, fleet: FleetView) -> bool:
        return False

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        return take_in_start_order(fleet, ready, self.batch_size)

    def should_update_weights(self, fleet: FleetView) -> bool:
        at_boundary = not fleet.num_in_flight
        return fleet.newest_version > fleet.version and (self.updates == "in_flight" or at_boundary)


def one_step_off(batch_size: int, num_in_flight: int | None = None) -> BoundedSchedule:
    """One-step-off-policy RL; `batch_size` and `num_in_flight` in rollouts."""
    return BoundedSchedule(batch_size, max_lag=1, updates="boundary", num_in_flight=num_in_flight)
