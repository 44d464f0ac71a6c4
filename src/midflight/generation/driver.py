"""The thread that owns a Generator. Everybody else passes it commands, which it carries out between two steps.

consumes       commands; the Generator's completions
waits for      a command, if nothing is in flight or it is paused
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
    """Tokens of one request that its listener has not seen yet; the last of them come with a finish reason."""

    rollout_id: RolloutId
    generated: GeneratedTokens
    finish_reason: FinishReason | None
    prompt: GeneratedTokens | None = None  # with the last of them, if it was to be scored


Listener = Callable[[Progress | GenerationError], None]


@dataclass(slots=True)
class Counters:
    """Totals since the start; written by the driver's thread only."""

    finished: int = 0
    aborted: int = 0
    generated_tokens: int = 0  # counted as they are handed to a listener
    updates: int = 0
    update_pause_s: float = 0.0  # of the last update


@dataclass(slots=True)
class _Listening:
    listener: Listener
    num_resumed: int  # tokens it came with
    chunk_tokens: int | None  # None: everything at the end
    added_at_step: int
    num_seen: int = 0  # tokens handed to the listener


@dataclass(frozen=True, slots=True)
class _Update:
    future: Future[float]
    weights: Mapping[str, Tensor]  # in use until the update is done
    pause_s: float


class GeneratorDriver:
    """Steps a Generator while something is in flight. Commands return futures; listeners run in the driver's thread.

    A step that raises is the end: everything in flight and every later command fails with that GenerationError.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._condition = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed = False
        self._listening: dict[RolloutId, _Listening] = {}
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
        return len(self._listening)

    def add(
        self, requests: Sequence[GenerationRequest], listener: Listener, chunk_tokens: int | None = None
    ) -> Future[None]:
        """Add requests, all or none. The listener hears of at most `chunk_tokens` new tokens at a time.

        Raises (the future): RequestError if one does not fit.
        """

        def command() -> None:
            self._generator.add(requests)
            for request in requests:
                num_resumed = len(request.generated) if request.generated else 0
                self._listening[request.rollout_id] = _Listening(listener, num_resumed, chunk_tokens, self._num_steps)

        return self._submit(command)

    def abort(self, rollout_ids: Sequence[RolloutId] | None = None) -> Future[list[Completion]]:
        """Stop these requests, or all; those not in flight are passed over. Their listeners hear of it too."""

        def command() -> list[Completion]:
            wanted = self._listening if rollout_ids is None else dict.fromkeys(rollout_ids)
            completions = self._generator.abort([each for each in wanted if each in self._listening])
            for completion in completions:
                self._end(completion)
            self.counters.aborted += len(completions)
            return completions

        return self._submit(command)

    def pause(self) -> Future[None]:
        """Sample nothing until `resume`, but for the steps that an update already begun needs to be swapped in."""
        return self._submit(lambda: setattr(self, "paused", True))

    def resume(self) -> Future[None]:
        return self._submit(lambda: setattr(self, "paused", False))

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> Future[float]:
        """Swap in new weights; resolves to the pause in seconds once the tensors are no longer in use.

        Raises (the future): WeightUpdateError; the old weights go on serving.
        """
        done: Future[float] = Future()
        done.set_running_or_notify_cancel()  # what has begun cannot be canceled

        def command() -> None:
            started_s = time.perf_counter()
            self._generator.update_weights(version, weights)
            self._update = _Update(done, weights, time.perf_counter() - started_s)
            self._finish_update()

        self._submit(command).add_done_callback(lambda carried_out: _pass_on_failure(carried_out, done))
        return done

    def close(self) -> None:
        """Stop the thread; what is in flight stays where it is."""
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
                self._carry_out(command, future)
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
        return self._update is not None or (not self.paused and bool(self._listening))

    def _carry_out(self, command: Callable[[], Any], future: Future[Any]) -> None:
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
        for rollout_id, listening in self._listening.items():
            # A step adds one token at most, so it is enough to look every `chunk_tokens` steps.
            age = self._num_steps - listening.added_at_step
            if listening.chunk_tokens and age % listening.chunk_tokens == 0:
                new = self._generator.generated(rollout_id, listening.num_seen)
                if len(new):
                    self._tell(listening, Progress(rollout_id, new, None))
        self._finish_update()

    def _end(self, completion: Completion) -> None:
        listening = self._listening.pop(completion.rollout_id)
        rest = completion.generated.part(listening.num_seen)
        last = Progress(completion.rollout_id, rest, completion.finish_reason, completion.prompt)
        self._tell(listening, last)

    def _tell(self, listening: _Listening, progress: Progress) -> None:
        before = max(listening.num_seen, listening.num_resumed)
        listening.num_seen += len(progress.generated)
        self.counters.generated_tokens += max(0, listening.num_seen - before)
        listening.listener(progress)

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
        for listening in self._listening.values():
            listening.listener(failure)
        self._listening.clear()
        if self._update is not None:
            self._update.future.set_exception(failure)
            self._update = None


def _pass_on_failure(source: Future[Any], target: Future[Any]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)
