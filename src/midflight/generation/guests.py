"""Sequences of clients other than the run: waiting, or in slots of the engine that the run leaves free.

Only the driver's thread uses this. A guest whose slot the run needs is taken out with its tokens. It waits before the
others of its client and continues later as if never interrupted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from midflight.generation.admission import PATIENCE_S, GuestLimit
from midflight.protocols import Generator
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId


class Guests:
    """The guests of an engine. Clients take turns, one sequence each."""

    def __init__(self, engine: Generator, num_slots: int | None) -> None:
        self._engine, self._limit = engine, GuestLimit(num_slots)
        self._waiting: OrderedDict[str, deque[GenerationRequest]] = OrderedDict()  # by client, the next one first
        self._client_of: dict[RolloutId, str] = {}
        self._running: dict[RolloutId, GenerationRequest] = {}  # in the engine, the oldest first

    @property
    def num_running(self) -> int:
        return len(self._running)

    def __contains__(self, rollout_id: RolloutId) -> bool:
        return rollout_id in self._client_of

    def __len__(self) -> int:
        return len(self._client_of)

    def add(self, requests: Sequence[GenerationRequest], client: str) -> None:
        """Queue requests, all or none. Raises: RequestError if the engine cannot run one of them."""
        self._engine.add(requests)  # checks them
        self._engine.abort([request.rollout_id for request in requests])
        self._waiting.setdefault(client, deque()).extend(requests)
        self._client_of |= {request.rollout_id: client for request in requests}

    def balance(
        self, num_run: int, is_connected: bool, now_s: float
    ) -> tuple[list[GenerationRequest], list[RolloutId]]:
        """Start or take out guests before the next step; return the started requests and the ids taken out."""
        allowed = self._limit.allowed(num_run, is_connected, now_s)
        started = []
        while len(self._running) < allowed and self._waiting and self._limit.may_start():
            request = self._next()
            self._limit.started(len(request.prompt_token_ids) + len(request.generated or ()))
            self._running[request.rollout_id] = request
            started.append(request)
        if started:
            self._engine.add(started)
        num_surplus = max(0, len(self._running) - max(0, allowed))
        return started, self._take_out(list(self._running)[len(self._running) - int(num_surplus) :])

    def wait_s(self) -> float | None:
        """Return the time after which waiting guests may start although nothing else happens; None if none waits."""
        return PATIENCE_S if self._waiting else None

    def take_waiting(self, rollout_ids: Iterable[RolloutId]) -> list[Completion]:
        """Remove those of these guests that wait, and return their tokens."""
        ids = {key for key in rollout_ids if key in self._client_of and key not in self._running}
        completions = []
        for client in {self._client_of.pop(key) for key in ids}:
            queue = self._waiting.pop(client)
            kept = deque(request for request in queue if request.rollout_id not in ids)
            if kept:
                self._waiting[client] = kept
            completions += [_aborted(request) for request in queue if request.rollout_id in ids]
        return completions

    def forget(self, rollout_id: RolloutId) -> None:
        """Note that a sequence has ended in the engine."""
        self._running.pop(rollout_id, None)
        self._client_of.pop(rollout_id, None)

    def clear(self) -> None:
        """Forget all guests."""
        for each in (self._waiting, self._client_of, self._running):
            each.clear()

    def _next(self) -> GenerationRequest:
        client, queue = self._waiting.popitem(last=False)
        request = queue.popleft()
        if queue:
            self._waiting[client] = queue  # behind the other clients
        return request

    def _take_out(self, rollout_ids: Sequence[RolloutId]) -> list[RolloutId]:
        for completion in self._engine.abort(rollout_ids) if rollout_ids else ():
            request = self._running.pop(completion.rollout_id)
            # A prompt that is scored is scored again, with the tokens after it.
            if len(completion.generated) and not request.score_prompt:
                request = replace(request, generated=completion.generated)
            self._waiting.setdefault(self._client_of[request.rollout_id], deque()).appendleft(request)
        return list(rollout_ids)


def _aborted(request: GenerationRequest) -> Completion:
    return Completion(request.rollout_id, request.generated or GeneratedTokens.none(), FinishReason.ABORT)
