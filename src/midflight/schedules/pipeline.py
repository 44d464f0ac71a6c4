"""PipelineRL: generation and training never wait for each other's phases.

Each engine always keeps `num_in_flight` sequences in flight. It adopts the weights of each optimizer step between two
tokens. A batch takes the groups that finished first. The lag of a token is therefore about the number of optimizer
steps during the lifetime of its sequence.

Finished rollouts wait in a queue of `queue_capacity`, which does not count the batch in training. If the queue is full,
either finished slots are not refilled ("block"), or the groups that finished first are dropped ("drop_oldest":
PipelineRL's ring buffer). To drop groups, the actor must own the queue: it then hands over a batch only when the
trainer has none.

With `max_lag` set, a hard bound holds. Proof:
1. Weights of version k train on batch k, and batches are taken in start order.
2. A rollout is admitted while fewer than (version + max_lag + 1) * batch_size are started, where `version` is the
   version that the engine samples with. Its batch therefore has an index of at most version + max_lag.
3. Versions never decrease along a sequence, so each of its tokens has a lag of at most max_lag.
Both halves are needed: a cap on admissions alone lets a late-finishing rollout slip to a later batch. Groups that fail
or are dropped only move later groups forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from midflight.schedules.batches import num_startable, take_batch, take_in_start_order
from midflight.types import BatchChoice, FleetView, GroupId, ReadyGroup


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """In-flight weight updates, with an optional bound on the lag."""

    batch_size: int  # rollouts
    num_in_flight: int  # rollouts per engine
    queue_capacity: int  # finished rollouts that wait for training; at least batch_size
    max_lag: int | None = None  # optimizer steps; None: no bound
    when_full: Literal["block", "drop_oldest"] = "block"
    colocated: bool = False

    @property
    def max_in_flight(self) -> int:
        return self.num_in_flight

    def num_to_admit(self, fleet: FleetView) -> int:
        free = self.num_in_flight * fleet.num_engines - fleet.num_in_flight
        # Rollouts that wait for grades are never dropped: a verifier slower than generation must slow generation down.
        waiting = fleet.num_ungraded + (self._num_waiting(fleet) if self.when_full == "block" else 0)
        free -= max(0, waiting - self.queue_capacity)
        if self.max_lag is not None:
            free = min(free, num_startable(fleet, self.batch_size, self.max_lag))
        return max(0, free)

    def should_abort(self, fleet: FleetView) -> bool:
        return False

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        if self.when_full == "drop_oldest" and fleet.num_batches > fleet.newest_version:
            return self._drop_oldest(fleet, ready)
        if self.max_lag is not None:
            return take_in_start_order(fleet, ready, self.batch_size)
        return take_batch(ready, self.batch_size)

    def should_update_weights(self, fleet: FleetView) -> bool:
        return fleet.newest_version > fleet.version

    def _num_waiting(self, fleet: FleetView) -> int:
        num_taken = min(fleet.num_batches, fleet.newest_version + 1) * self.batch_size
        return fleet.num_finished - num_taken

    def _drop_oldest(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        excess = self._num_waiting(fleet) - self.queue_capacity
        dropped: list[GroupId] = []
        for group in ready:
            if excess <= 0:
                break
            dropped.append(group.group_id)
            excess -= group.num_rollouts
        return BatchChoice(drop=tuple(dropped)) if dropped else None
