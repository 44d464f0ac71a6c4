"""The thread that owns an engine. Other threads send it commands, which it executes between two steps.

consumes       commands; the completions of the engine; weights that another thread has staged
waits for      a command or new weights, while nothing is in flight or the driver is paused
unblocked by   any command; the end of `stage`; close

Weights have a lineage and a version. Within a lineage, versions never go back. Weights of another lineage replace the
weights in use whatever their versions are; the requests in flight are aborted first.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from midflight.errors import GenerationError, GenerationLostError, MidflightError, WeightUpdateError
from midflight.generation.guests import Guests
from midflight.protocols import IncomingWeights, LocalEngine
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId, WeightLabel

T = TypeVar("T")

# Engines start requests about in the order in which they came. The search for started ones ends after so many that have
# not started; it goes further in every 32nd step.
_MAX_UNSTARTED, _MAX_UNSTARTED_AT_TIMES, _AT_TIMES = 4, 256, 32

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
    update_pause_s: float = 0.0  # duration of the last step that adopted weights


@dataclass(slots=True)
class _Subscription:
    listener: Listener
    num_resumed: int  # generated tokens that came with the request
    chunk_tokens: int | None  # None: all tokens at the end
    num_known: int  # tokens at the start of the sequence in the engine
    num_seen: int = 0  # tokens that the listener has received


@dataclass(frozen=True, slots=True)
class _Wish:
    lineage: str
    version: int
    future: Future[WeightLabel]


class GeneratorDriver:
    """Steps an engine while requests are in flight. Commands return futures; listeners run in the driver's thread.

    `active`: the weights that sample the next token. `staged`: the weights that were staged last, if not adopted yet.
    If a step raises, generation has failed: all requests in flight and all later commands fail with a GenerationError.

    `num_runs`: number of connected runs. Their requests come first. Requests with a `client` are guests, which use only
    slots that the runs leave free. `num_slots`: of the engine; None: not known, and never short.
    """

    def __init__(self, engine: LocalEngine, num_slots: int | None = None) -> None:
        self._engine, self._guests, self.num_slots = engine, Guests(engine, num_slots), num_slots
        self._numbers = itertools.count()
        self.num_runs = 0
        self._condition = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed = False
        self._subscriptions: dict[RolloutId, _Subscription] = {}
        self._unstarted: dict[RolloutId, None] = {}  # streamed requests without a token yet, the oldest first
        self._streaming: dict[RolloutId, int] = {}  # the other streamed requests, with the step before the first token
        self._wishes: list[_Wish] = []
        self._num_steps = 0
        self.paused = False
        self.failure: GenerationError | None = None
        self.counters = Counters()
        version = engine.weight_version
        self.active = WeightLabel(version, version)
        self.staged: WeightLabel | None = None
        self._is_due = False  # True: the next step adopts weights
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        return len(self._subscriptions)

    def numbered(self, requests: Iterable[GenerationRequest]) -> list[GenerationRequest]:
        """Return the requests with ids that no other request of this driver has; they sample the same tokens."""
        return [
            replace(request, rollout_id=RolloutId(next(self._numbers)), sampled_as=request.rollout_id)
            for request in requests
        ]

    def add(
        self,
        requests: Sequence[GenerationRequest],
        listener: Listener,
        chunk_tokens: int | None = None,
        client: str | None = None,
    ) -> Future[None]:
        """Add requests, all or none. The listener receives at most `chunk_tokens` new tokens at a time.

        `client`: the client whose guests they are; None: they belong to a run.
        Raises (the future): RequestError if the generator cannot run one of them.
        """

        def command() -> None:
            if client is None:
                self._engine.add(requests)
            else:
                self._guests.add(requests, client)
            for request in requests:
                num_resumed = len(request.generated or ())
                self._subscriptions[request.rollout_id] = _Subscription(
                    listener, num_resumed, chunk_tokens, num_resumed
                )
                if chunk_tokens and client is None:
                    self._unstarted[request.rollout_id] = None

        return self._submit(command)

    def abort(self, rollout_ids: Sequence[RolloutId] | None = None) -> Future[list[Completion]]:
        """Stop these requests, or all; ids that are not in flight are ignored. Listeners get a last progress."""
        return self._submit(lambda: self._abort(self._subscriptions if rollout_ids is None else rollout_ids))

    def wind_down(self) -> Future[None]:
        """Stop all requests, and fail the adoptions that wait, with a GenerationLostError."""

        def command() -> None:
            self._abort(self._subscriptions)
            self._fail_wishes(GenerationLostError("the server is shutting down"))

        return self._submit(command)

    def pause(self) -> Future[None]:
        """Stop stepping until `resume`, except for one step to adopt new weights."""
        return self._submit(lambda: setattr(self, "paused", True))

    def resume(self) -> Future[None]:
        """Continue stepping after `pause`."""
        return self._submit(lambda: setattr(self, "paused", False))

    def stage(self, incoming: IncomingWeights) -> None:
        """Hand new weights to the engine in the caller's thread; return when they are complete, before their adoption.

        Raises: WeightUpdateError if the weights do not fit or are incomplete; the old weights stay in use.
        """
        if self.failure:
            raise self.failure
        staged = incoming.label
        with self._condition:
            self.staged = None
        self._engine.stage(incoming)
        self._submit(lambda: self._note_staged(staged)).result()

    def adopt(self, lineage: str, version: int) -> Future[WeightLabel]:
        """Sample with this version or a newer one of the lineage as soon as it is staged; the future resolves then."""
        adopted: Future[WeightLabel] = Future()
        adopted.set_running_or_notify_cancel()  # an adoption cannot be canceled

        def command() -> None:
            self._wishes.append(_Wish(lineage, version, adopted))
            self._adopt()

        self._submit(command).add_done_callback(lambda executed: _copy_failure(executed, adopted))
        return adopted

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
                self._condition.wait_for(
                    lambda: self._commands or self._closed or self._has_work(), self._guests.wait_s()
                )
                if self._closed:
                    self._fail(GenerationError("generation has been shut down"))
                commands = list(self._commands)
                self._commands.clear()
            for command, future in commands:
                self._execute(command, future)
            if self._closed:
                return
            if not self.failure:
                self._balance()
            if self._has_work():
                try:
                    self._step()
                except Exception as error:
                    _log.exception("a generation step failed")
                    self._fail(GenerationError(f"generation failed: {type(error).__name__}: {error}"))

    def _has_work(self) -> bool:
        has_sequences = self._num_run + self._guests.num_running > 0
        return not self.failure and (self._is_due or (not self.paused and has_sequences))

    @property
    def _num_run(self) -> int:
        return len(self._subscriptions) - len(self._guests)

    def _balance(self) -> None:
        started, taken_out = self._guests.balance(self._num_run, self.num_runs > 0, time.monotonic())
        for request in started:
            subscription = self._subscriptions[request.rollout_id]
            subscription.num_known = len(request.generated or ())
            if subscription.chunk_tokens:
                self._unstarted[request.rollout_id] = None
        for rollout_id in taken_out:
            self._unstarted.pop(rollout_id, None)
            self._streaming.pop(rollout_id, None)

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
        started_s, before = time.perf_counter(), self.active
        expected, self._is_due = self.staged if self._is_due else None, False
        try:
            completions = self._engine.step()
        except WeightUpdateError as error:  # the sender knows, too; the engine says what it does next
            _log.warning("%s", error)
            return
        self._note_adopted(expected)
        if self.active != before:
            self.counters.updates += 1
            self.counters.update_pause_s = time.perf_counter() - started_s
        self._end_wishes()
        self._num_steps += 1
        for completion in completions:
            self._end(completion)
        self.counters.finished += len(completions)
        for rollout_id in self._find_started():
            del self._unstarted[rollout_id]
            self._streaming[rollout_id] = self._num_steps - 1
        for rollout_id, started_at in self._streaming.items():
            subscription = self._subscriptions[rollout_id]
            # A step adds at most one token per sequence, so it is enough to look every `chunk_tokens` steps.
            if (self._num_steps - started_at) % (subscription.chunk_tokens or 1) == 0:
                new = self._engine.generated(rollout_id, subscription.num_seen)
                if len(new):
                    self._report(subscription, Progress(rollout_id, new, None))

    def _abort(self, rollout_ids: Iterable[RolloutId]) -> list[Completion]:
        ids = [key for key in dict.fromkeys(rollout_ids) if key in self._subscriptions]
        completions = self._guests.take_waiting(ids)
        waited = {completion.rollout_id for completion in completions}
        completions += self._engine.abort([key for key in ids if key not in waited])
        for completion in completions:
            self._end(completion)
        self.counters.aborted += len(completions)
        return completions

    def _find_started(self) -> list[RolloutId]:
        """Return streamed requests that have their first token now."""
        num_left = _MAX_UNSTARTED if self._num_steps % _AT_TIMES else _MAX_UNSTARTED_AT_TIMES
        started = []
        for rollout_id in self._unstarted:
            if len(self._engine.generated(rollout_id, self._subscriptions[rollout_id].num_known)):
                started.append(rollout_id)
                continue
            num_left -= 1
            if not num_left:
                break
        return started

    def _end(self, completion: Completion) -> None:
        subscription = self._subscriptions.pop(completion.rollout_id)
        self._guests.forget(completion.rollout_id)
        self._unstarted.pop(completion.rollout_id, None)
        self._streaming.pop(completion.rollout_id, None)
        rest = completion.generated.part(subscription.num_seen)
        last = Progress(completion.rollout_id, rest, completion.finish_reason, completion.prompt)
        self._report(subscription, last)

    def _report(self, subscription: _Subscription, progress: Progress) -> None:
        before = max(subscription.num_seen, subscription.num_resumed)
        subscription.num_seen += len(progress.generated)
        self.counters.generated_tokens += max(0, subscription.num_seen - before)
        subscription.listener(progress)

    # --- weights, in the driver's thread ----------------------------------------------------------------------

    def _note_staged(self, staged: WeightLabel) -> None:
        self.staged = staged
        self._note_adopted(None)  # an engine may use weights as soon as they are complete
        self._adopt()

    def _adopt(self) -> None:
        """Ask the engine for the staged weights if a wish does."""
        staged = self.staged
        if staged is not None and any(staged.covers(wish.lineage, wish.version) for wish in self._wishes):
            if staged.lineage != self.active.lineage:
                self._abort(self._subscriptions)
            self._engine.adopt(staged.version)
            self._is_due = True
        self._end_wishes()

    def _note_adopted(self, expected: WeightLabel | None) -> None:
        """Find out which weights the engine uses. `expected`: the staged weights, if it should have adopted them."""
        version, staged = self._engine.weight_version, self.staged
        if staged is not None and staged.version == version and (staged is expected or self._is_newer(staged)):
            self.active, self.staged = staged, None
        elif version != self.active.version:  # the engine had newer weights already when it adopted
            self.active = WeightLabel(version, version, self.active.lineage)

    def _is_newer(self, staged: WeightLabel) -> bool:
        return staged.lineage == self.active.lineage and staged.version >= self.active.version

    def _end_wishes(self) -> None:
        for wish in self._wishes:
            if self.active.covers(wish.lineage, wish.version):
                wish.future.set_result(self.active)
        self._wishes = [wish for wish in self._wishes if not wish.future.done()]

    def _fail_wishes(self, error: MidflightError) -> None:
        for wish in self._wishes:
            wish.future.set_exception(error)
        self._wishes.clear()

    def _fail(self, failure: GenerationError) -> None:
        self.failure = failure
        for subscription in self._subscriptions.values():
            subscription.listener(failure)
        self._subscriptions.clear()
        self._guests.clear()
        self._unstarted.clear()
        self._streaming.clear()
        self._fail_wishes(failure)


def _copy_failure(source: Future[Any], target: Future[Any]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)
