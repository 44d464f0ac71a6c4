"""The rollout loop: generate, adopt new weights in flight, hand over the groups of each batch.

consumes       problems, grades, and weights from the trainer
waits for      grades or new weights, when the schedule wants nothing generated
unblocked by   the grader answering, the trainer publishing; a stop request is seen within WAIT_SLICE_S
makes wait     the trainer, when it has no batch
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from midflight.actor.actor import Actor, ChosenGroups
from midflight.actor.meter import RolloutMeter
from midflight.actor.partials import PartialBuffer
from midflight.errors import StreamError
from midflight.protocols import Generator, Schedule, WeightReceiver
from midflight.tracing.spans import Tracer
from midflight.types import ChosenBatch

WAIT_SLICE_S = 0.2


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often what costs more than a token does is done, seconds; 0: in every turn."""

    grades_s: float = 0.01  # exchanging responses for grades, while there is something to generate
    save_s: float = 0.1  # writing what is in flight to the partial-rollout buffer


class BatchSink(Protocol):
    """Where chosen groups go: a stream of them, or what makes a batch of them at once."""

    def append(self, record: ChosenBatch, timeout_s: float | None = None) -> int | None:
        """As `Stream.append`."""
        ...


class RolloutLoop:
    def __init__(
        self,
        actor: Actor,
        generator: Generator,
        schedule: Schedule,
        receiver: WeightReceiver,
        sink: BatchSink,
        tracer: Tracer,
        partials: PartialBuffer | None = None,
        intervals: Intervals = Intervals(),
    ) -> None:
        """What is in flight is written to `partials`, if there is one, now and then and at the end."""
        self._actor = actor
        self._generator = generator
        self._schedule = schedule
        self._receiver = receiver
        self._sink = sink
        self._tracer = tracer
        self._partials = partials
        self._intervals = intervals
        self._next_grades_s = self._next_save_s = 0.0
        self._meter = RolloutMeter(tracer, actor.state)

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Until asked to stop."""
        while not should_stop():
            newest = self._receiver.newest_version()
            assert newest is not None, "the trainer publishes its first weights before the loop starts"
            # A trainer that was started again makes versions once more that are sampled with already.
            self.turn(max(newest, self._generator.weight_version))
        self._actor.stop()
        self._save()

    def turn(self, newest: int) -> None:
        """Everything there is to do at one token, if `newest` is the newest version of the weights."""
        actor, schedule = self._actor, self._schedule
        fleet = actor.fleet(newest)
        # The tensors of an update that is being copied must not be received over.
        if not self._generator.update_pending and schedule.should_update_weights(fleet):
            self._update_weights()
            fleet = actor.fleet(newest)
        if schedule.should_abort(fleet):
            actor.abort()
            fleet = actor.fleet(newest)
        actor.admit(fleet)
        # A pending update goes on in steps, even if there is nothing left to sample.
        num_in_flight = self._generator.num_in_flight
        if num_in_flight or self._generator.update_pending:
            with self._tracer.span("decode", rows=num_in_flight):
                actor.step()
        now_s = time.monotonic()
        if now_s >= self._next_grades_s:
            actor.collect_grades()
            self._next_grades_s = now_s + self._intervals.grades_s
        handed_over = self._hand_over(newest)
        if now_s >= self._next_save_s:
            self._save()
            self._next_save_s = now_s + self._intervals.save_s
        if not self._generator.num_in_flight and not handed_over:
            self._wait(newest)

    def _wait(self, newest: int) -> None:
        """For whoever must act next, unless the schedule itself has something to start."""
        if self._actor.num_ungraded:
            with self._tracer.span("grade"):
                self._actor.collect_grades(WAIT_SLICE_S)
        elif not self._schedule.num_to_admit(self._actor.fleet(newest)):
            with self._tracer.span("wait"):
                self._receiver.wait(newer_than=newest, timeout_s=WAIT_SLICE_S)

    def _update_weights(self) -> None:
        with self._tracer.span("update"):
            version, weights = self._receiver.receive()
            if version <= self._generator.weight_version:
                return
            self._generator.update_weights(version, weights)
        self._actor.note_update()
        self._meter.note_update(sum(tensor.nbytes for tensor in weights.values()))

    def _hand_over(self, newest: int) -> bool:
        """Append every batch the schedule can make now; whether there was one."""
        handed_over = False
        while chosen := self._actor.choose_batch(self._actor.fleet(newest)):
            self._append(chosen)
            handed_over = True
        return handed_over

    def _append(self, chosen: ChosenGroups) -> None:
        state = self._actor.state
        batch = ChosenBatch(
            index=state.num_batches - 1,
            groups=chosen.groups,
            generated_lengths=chosen.generated_lengths,
            dropped_lengths=chosen.dropped_lengths,
            metrics=self._meter.read(state, self._actor),
            actor_state=state,
        )
        # The schedule bounds how far generation runs ahead; a full stream means that it does not.
        if self._sink.append(batch, timeout_s=0) is None:
            raise StreamError(f"the stream of batches is full at batch {batch.index}")

    def _save(self) -> None:
        if self._partials is None:
            return
        with self._tracer.span("save"):
            self._partials.save(self._actor.state, self._actor.open_rollouts(), self._actor.tokens_of)
