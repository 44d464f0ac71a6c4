"""PipelineRL: generation and training never wait for each other's phases.

`num_in_flight` sequences are kept going always; each optimizer step's weights are adopted between two tokens. A
batch is whatever finished first, so a token's lag is about the number of optimizer steps its sequence lives through.

With `max_lag` set, a hard bound holds. Proof: batch k is trained by weights of version k, and batches are taken in
start order. A rollout is admitted while fewer than (version + max_lag + 1) * batch_size are started, where `version`
is what the engine samples with; so it lands in a batch of index at most version + max_lag, and since versions never
decrease along a sequence, each of its tokens has a lag of at most max_lag. Both halves are needed: a cap on
admissions alone lets a late-finishing rollout slip to a later batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midflight.schedules.batches import take_batch
from midflight.types import BatchChoice, FleetView, ReadyGroup


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    batch_size: int  # rollouts
    num_in_flight: int  # rollouts
    max_waiting: int  # finished rollouts not trained on yet; past it a finished slot is not refilled
    max_lag: int | None = None  # optimizer steps
    colocated: bool = False

    @property
    def max_in_flight(self) -> int:
        return self.num_in_flight

    def num_to_admit(self, fleet: FleetView) -> int:
        waiting = fleet.num_finished - fleet.newest_version * self.batch_size
        blocked = max(0, waiting - self.max_waiting)
        free = self.num_in_flight - blocked - fleet.num_in_flight
        if self.max_lag is not None:
            free = min(free, (fleet.version + self.max_lag + 1) * self.batch_size - fleet.num_started)
        return max(0, free)

    def should_abort(self, fleet: FleetView) -> bool:
        return False

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        if self.max_lag is None:
            return take_batch(ready, self.batch_size)
        in_start_order = sorted(ready, key=lambda group: group.group_id)
        oldest_open = fleet.oldest_open_group
        if oldest_open is not None:
            in_start_order = [group for group in in_start_order if group.group_id < oldest_open]
        return take_batch(in_start_order, self.batch_size)

    def should_update_weights(self, fleet: FleetView) -> bool:
        return fleet.newest_version > fleet.version
