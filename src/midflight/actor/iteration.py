"""The decisions of one iteration of the rollout loop, in order. The rollout loop and the simulator both run this."""

from __future__ import annotations

from typing import Protocol

from midflight.actor.ledger import Ledger
from midflight.protocols import Schedule
from midflight.types import BatchChoice, FleetView


class Rollouts(Protocol):
    """The generation side of a run, which carries out decisions and reports to its ledger."""

    def fleet(self) -> FleetView: ...

    def update_weights(self) -> None:
        """Make the engines adopt the newest weights. An update may take several iterations."""
        ...

    def abort(self) -> None:
        """Interrupt all rollouts in flight."""
        ...

    def admit(self, num_rollouts: int) -> None: ...

    def generate(self) -> None:
        """Sample the next token of every rollout in flight, and collect grades."""
        ...

    def has_room(self) -> bool:
        """Return False while the stream of batches is full."""
        ...

    def hand_over(self, choice: BatchChoice) -> None:
        """Append the groups to train on as the next batch, and drop the groups to drop."""
        ...


def iterate(schedule: Schedule, ledger: Ledger, rollouts: Rollouts) -> bool:
    """Run one iteration: weights, interruptions, admissions, a token, batches. Return True if a batch was handed over.

    The schedule is asked only when its answer can matter: about updates if there are newer weights, about aborts if
    rollouts are in flight, about a batch if enough rollouts are ready. While the stream is full, finished groups stay
    ready. This delay changes no batch: a batch holds the groups that finished first, or started first.
    """
    fleet = rollouts.fleet()
    if fleet.newest_version > fleet.version and schedule.should_update_weights(fleet):
        rollouts.update_weights()
        fleet = rollouts.fleet()
    if fleet.num_in_flight and schedule.should_abort(fleet):
        rollouts.abort()
        fleet = rollouts.fleet()
    num_new = schedule.num_to_admit(fleet)
    if num_new:
        rollouts.admit(num_new)
    rollouts.generate()
    handed_over = False
    while ledger.ready.num_rollouts >= ledger.batch_size and rollouts.has_room():
        choice = schedule.choose_batch(rollouts.fleet(), ledger.ready)
        if choice is None or not (choice.train or choice.drop):
            break
        rollouts.hand_over(choice)
        handed_over = handed_over or bool(choice.train)
    return handed_over
