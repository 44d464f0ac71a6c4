"""The thread that owns a Generator. Other threads send it commands, which it executes between two steps.

consumes       commands; the completions of the Generator
waits for      a command, while nothing is in flight or the driver is paused
unblocked by   any command; close
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from midflight.errors import GenerationError, NonFiniteWeightsError
from midflight.protocols import Generator
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of one request since its last progress; the last progress of a request has the finish reason."""

    rollout_id: RolloutId
    generated: GeneratedTokens
    finish_reason: FinishReason | None
    prompt: GeneratedTokens | None = None  # the scored prompt, if requested, in the last progress


Listener = Callable[[Progress | GenerationError], None]


@dataclass(slots=True)
class Counters:
    """Totals since the start; only the driver's thread writes them."""

    finished: int = 0
    aborted: int = 0
    generated_tokens: int = 0  # tokens that listeners have received
    updates: int = 0
    update_pause_s: float = 0.0  # pause of the last update


@dataclass(slots=True)
class _Subscription:
    listener: Listener
    num_resumed: int  # generated tokens that came with the request
    chunk_tokens: int | None  # None: all tokens at the end
    added_at_step: int
    num_seen: int = 0  # tokens that the listener has received


@dataclass(frozen=True, slots=True)
class _Update:
    future: Future[float]
    weights: Mapping[str, Tensor]  # kept alive until the update has ended
    pause_s: float


class GeneratorDriver:
    """Steps a Generator while requests are in flight. Commands return futures; listeners run in the driver's thread.

    If a step raises, generation has failed: all requests in flight and all later commands fail with a GenerationError.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._condition = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed = False
        self._subscriptions: dict[RolloutId, _Subscription] = {}
        self._update: _Update | None = None
        self._num_steps = 0
        self.paused = False
        self.failure: GenerationError | None = None
        self.counters = Counters()
        self.weight_version = generator.weight_version
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        return len(self._subscriptions)

    def add(
        self, requests: Sequence[GenerationRequest], listener: Listener, chunk_tokens: int | None = None
    ) -> Future[None]:
        """Add requests, all or none. The listener receives at most `chunk_tokens` new tokens at a time.

        Raises (the future): RequestError if the generator cannot run one of them.
        """

        def command() -> None:
            self._generator.add(requests)
            for request in requests:
                num_resumed = len(request.generated) if request.generated else 0
                self._subscriptions[request.rollout_id] = _Subscription(
                    listener, num_resumed, chunk_tokens, self._num_steps
                )

        return self._submit(command)

    def abort(self, rollout_ids: Sequence[RolloutId] | None = None) -> Future[list[Completion]]:
        """Stop these requests, or all; ids that are not in flight are ignored. Listeners get a last progress."""

        def command() -> list[Completion]:
            ids = self._subscriptions if rollout_ids is None else dict.fromkeys(rollout_ids)
            completions = self._generator.abort([key for key in ids if key in self._subscriptions])
            for completion in completions:
                self._end(completion)
            self.counters.aborted += len(completions)
            return completions

        return self._submit(command)

    def pause(self) -> Future[None]:
        """Stop stepping until `resume`, except for steps that a pending weight update needs."""
        return self._submit(lambda: setattr(self, "paused", True))

    def resume(self) -> Future[None]:
        """Continue stepping after `pause`."""
        return self._submit(lambda: setattr(self, "paused", False))

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> Future[float]:
        """Swap in new weights. The future resolves to the pause (seconds) once the tensors are no longer in use.

        Raises (the future): WeightUpdateError; the old weights then stay in use.
        """
        done: Future[float] = Future()
        done.set_running_or_notify_cancel()  # an update cannot be canceled

        def command() -> None:
            started_s = time.perf_counter()
            self._generator.update_weights(version, weights)
            self._update = _Update(done, weights, time.perf_counter() - started_s)
            self._finish_update()

        self._submit(command).add_done_callback(lambda executed: _copy_failure(executed, done))
        return done

    def close(self) -> None:
        """Stop the thread. Listeners and later commands get a GenerationError; the Generator keeps its requests."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _submit(self, command: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._condition:
            if self._closed:
                future.set_exception(GenerationError("generation has been shut down"))
            else:
                self._commands.append((command, future))
                self._condition.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._commands or self._closed or self._has_work())
                if self._closed:
                    self._fail(GenerationError("generation has been shut down"))
                commands = list(self._commands)
                self._commands.clear()
            for command, future in commands:
                self._execute(command, future)
            if self._closed:
                return
            if self._has_work():
                try:
                    self._step()
                except Exception as error:
                    _log.exception("a generation step failed")
                    self._fail(GenerationError(f"generation failed: {type(error).__name__}: {error}"))

    def _has_work(self) -> bool:
        if self.failure:
            return False
        return self._update is not None or (not self.paused and bool(self._subscriptions))

    def _execute(self, command: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self.failure:
            future.set_exception(self.failure)
            return
        try:
            future.set_result(command())
        except Exception as error:
            future.set_exception(error)

    def _step(self) -> None:
        try:
            completions = self._generator.step()
        except NonFiniteWeightsError as error:
            if self._update is None:
                raise
            update, self._update = self._update, None
            update.future.set_exception(error)
            return
        self._num_steps += 1
        for completion in completions:
            self._end(completion)
        self.counters.finished += len(completions)
        for rollout_id, subscription in self._subscriptions.items():
            # A step adds at most one token per sequence, so it is enough to check every `chunk_tokens` steps.
            age = self._num_steps - subscription.added_at_step
            if subscription.chunk_tokens and age % subscription.chunk_tokens == 0:
                new = self._generator.generated(rollout_id, subscription.num_seen)
                if len(new):
                    self._report(subscription, Progress(rollout_id, new, None))
        self._finish_update()

    def _end(self, completion: Completion) -> None:
        subscription = self._subscriptions.pop(completion.rollout_id)
        rest = completion.generated.part(subscription.num_seen)
        last = Progress(completion.rollout_id, rest, completion.finish_reason, completion.prompt)
        self._report(subscription, last)

    def _report(self, subscription: _Subscription, progress: Progress) -> None:
        before = max(subscription.num_seen, subscription.num_resumed)
        subscription.num_seen += len(progress.generated)
        self.counters.generated_tokens += max(0, subscription.num_seen - before)
        subscription.listener(progress)

    def _finish_update(self) -> None:
        if self._update is None or self._generator.update_pending:
            return
        update, self._update = self._update, None
        self.weight_version = self._generator.weight_version
        self.counters.updates += 1
        self.counters.update_pause_s = update.pause_s
        update.future.set_result(update.pause_s)

    def _fail(self, failure: GenerationError) -> None:
        self.failure = failure
        for subscription in self._subscriptions.values():
            subscription.listener(failure)
        self._subscriptions.clear()
        if self._update is not None:
            self._update.future.set_exception(failure)
            self._update = None


def _copy_failure(source: Future[Any], target: Future[Any]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)
