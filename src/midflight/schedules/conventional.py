"""Conventional RL: alternate between generating G batches and training G optimizer steps.

Lag bound G - 1: all rollouts of an RL step are sampled by its first version v, and versions v .. v + G - 1 train on its
batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from midflight.schedules.batches import take_batch
from midflight.types import BatchChoice, FleetView, ReadyGroup


@dataclass(frozen=True, slots=True)
class ConventionalSchedule:
    """Alternating generation and training, with G optimizer steps per RL step."""

    batch_size: int  # rollouts
    steps_per_rl_step: int = 1  # G, optimizer steps
    num_in_flight: int | None = None  # rollouts at a time; None: all rollouts of the RL step
    seed: int = 0  # of the shuffle
    colocated: bool = True

    @property
    def max_in_flight(self) -> int:
        return self.num_in_flight or self.steps_per_rl_step * self.batch_size

    def num_to_admit(self, fleet: FleetView) -> int:
        left_of_rl_step = self._end_of_rl_step(fleet) * self.batch_size - fleet.num_started
        return max(0, min(left_of_rl_step, self.max_in_flight - fleet.num_in_flight))

    def should_abort(self, fleet: FleetView) -> bool:
        return False

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        end = self._end_of_rl_step(fleet)
        if fleet.num_batches == end or fleet.num_finished < end * self.batch_size:
            return None
        return take_batch(self._shuffled(fleet, ready), self.batch_size)

    def should_update_weights(self, fleet: FleetView) -> bool:
        return fleet.newest_version >= self._end_of_rl_step(fleet)

    def _end_of_rl_step(self, fleet: FleetView) -> int:
        """Version after the last optimizer step of the RL step that the engine's weights began."""
        return (fleet.version // self.steps_per_rl_step + 1) * self.steps_per_rl_step

    def _shuffled(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> Iterator[ReadyGroup]:
        """Groups in start order for G = 1; else shuffled, so that the last batch does not get the longest responses."""
        groups = sorted(ready, key=lambda group: group.group_id)
        if self.steps_per_rl_step == 1:
            yield from groups
            return
        rng = random.Random(f"{self.seed}/{fleet.num_batches}")
        for place in range(len(groups)):  # only as far as the caller reads: an RL step may have very many groups
            other = rng.randrange(place, len(groups))
            groups[place], groups[other] = groups[other], groups[place]
            yield groups[place]
