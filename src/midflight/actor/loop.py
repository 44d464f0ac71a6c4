"""The rollout loop: generate, adopt new weights in flight, hand batches to the trainer.

consumes       problems, and weights from the trainer
waits for      new weights, when the schedule wants nothing generated; room in the stream of batches
unblocked by   the trainer publishing or reading; a stop request is seen within WAIT_SLICE_S
makes wait     the trainer, when it has no batch
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from midflight.actor.actor import Actor
from midflight.errors import StreamError
from midflight.preprocess.advantages import Float64Array
from midflight.preprocess.batches import build_batch
from midflight.protocols import Generator, Schedule, Stream, WeightReceiver
from midflight.tracing.spans import Tracer
from midflight.types import ActorCheckpoint, ActorState, TrainingBatch

WAIT_SLICE_S = 0.2


@dataclass(frozen=True, slots=True)
class Preprocessing:
    advantage: Callable[[Float64Array], Float64Array]
    max_tokens: int  # per microbatch


class RolloutLoop:
    def __init__(
        self,
        actor: Actor,
        generator: Generator,
        schedule: Schedule,
        receiver: WeightReceiver,
        batches: Stream[TrainingBatch],
        preprocessing: Preprocessing,
        tracer: Tracer,
    ) -> None:
        self._actor = actor
        self._generator = generator
        self._schedule = schedule
        self._receiver = receiver
        self._batches = batches
        self._preprocessing = preprocessing
        self._tracer = tracer
        self._meter = _Meter(tracer, actor.state)

    def run(self, should_stop: Callable[[], bool]) -> ActorCheckpoint:
        """Until asked to stop; the actor's state with the tokens of unfinished rollouts."""
        while not should_stop():
            newest = self._receiver.newest_version()
            assert newest is not None, "the trainer publishes its first weights before the loop starts"
            # The tensors of an update that is being copied must not be received over.
            if not self._generator.update_pending and self._schedule.should_update_weights(self._actor.fleet(newest)):
                self._update_weights()
            fleet = self._actor.fleet(newest)
            if self._schedule.should_abort(fleet):
                self._actor.abort()
                fleet = self._actor.fleet(newest)
            self._actor.admit(fleet)
            if self._generator.num_in_flight:
                with self._tracer.span("decode"):
                    self._actor.step()
            handed_over = self._hand_over(newest)
            if not self._generator.num_in_flight and not handed_over:
                with self._tracer.span("wait"):
                    self._receiver.wait(newer_than=newest, timeout_s=WAIT_SLICE_S)
        return self._actor.checkpoint()

    def _update_weights(self) -> None:
        with self._tracer.span("update"):
            version, weights = self._receiver.receive()
            self._generator.update_weights(version, weights)
        self._actor.note_update()

    def _hand_over(self, newest: int) -> int:
        """Append every batch the schedule can make now; how many."""
        num_batches = 0
        while groups := self._actor.choose_batch(self._actor.fleet(newest)):
            state = self._actor.state
            with self._tracer.span("preprocess"):
                batch = build_batch(
                    groups,
                    state,
                    index=state.num_batches - 1,
                    advantage=self._preprocessing.advantage,
                    max_tokens=self._preprocessing.max_tokens,
                    upstream_metrics=self._meter.read(state, self._generator.num_in_flight),
                )
            # The schedule bounds how far generation runs ahead; a full stream means that it does not.
            if self._batches.append(batch, timeout_s=0) is None:
                raise StreamError(f"the stream of batches is full at batch {batch.index}")
            num_batches += 1
        return num_batches


class _Meter:
    """Rates of the rollout side between two batches."""

    def __init__(self, tracer: Tracer, state: ActorState) -> None:
        self._tracer = tracer
        self._time = time.monotonic()
        self._generated_tokens, self._num_updates = state.generated_tokens, state.num_updates
        self._wait_s = self._update_s = 0.0

    def read(self, state: ActorState, num_in_flight: int) -> dict[str, float]:
        generated_tokens, num_updates = state.generated_tokens, state.num_updates
        now = time.monotonic()
        elapsed = max(now - self._time, 1e-9)
        wait_s, update_s = self._tracer.total_s("wait"), self._tracer.total_s("update")
        metrics = {
            "in_flight": float(num_in_flight),
            "throughput/generated_tokens_per_s": (generated_tokens - self._generated_tokens) / elapsed,
            "idle/generation_fraction": min(1.0, (wait_s - self._wait_s) / elapsed),
        }
        if num_updates > self._num_updates:
            metrics["update/pause_s"] = (update_s - self._update_s) / (num_updates - self._num_updates)
        self._time, self._generated_tokens, self._num_updates = now, generated_tokens, num_updates
        self._wait_s, self._update_s = wait_s, update_s
        return metrics
