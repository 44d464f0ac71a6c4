"""HTTP requests in flight: from GenerationRequests to deltas of text and tokens for each choice.

consumes       the driver's progress, through a queue on the event loop
waits for      progress
unblocked by   the driver; close, which aborts unfinished choices
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from midflight.errors import GenerationError
from midflight.generation.admission import QueueLimit
from midflight.generation.driver import GeneratorDriver, Progress
from midflight.generation.http_errors import ApiError
from midflight.generation.stop_cut import STOP_CHUNK_TOKENS, StopCut
from midflight.generation.text import Decode, Detokenizer, StopStrings
from midflight.models.stopping import StringStopRule
from midflight.types import FinishReason, GeneratedTokens, GenerationRequest, RolloutId

RETRY_AFTER_S = 2


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and tokens of one choice since its last delta; the last delta has the finish reason."""

    index: int
    rollout_id: RolloutId
    text: str
    generated: GeneratedTokens
    finish_reason: FinishReason | None
    prompt: GeneratedTokens | None = None  # the scored prompt, if requested, in the last delta


class _DeltaBuilder:
    """Builds the deltas of one choice: detokenizes, and ends the choice with the token that completes a stop string."""

    def __init__(self, index: int, decode: Decode, request: GenerationRequest, rule: StringStopRule | None) -> None:
        sampling, self._rollout_id = request.sampling, request.name
        self._index, self._stop_token_ids = index, sampling.stop_token_ids
        self._cut = None if rule is None else StopCut(rule)
        self._stop = StopStrings(sampling.stop)
        self._detokenizer = Detokenizer(decode)

    def build(self, progress: Progress) -> Delta:
        """Build the next delta. Tokens after the one that completes a stop string are dropped."""
        if self._cut is not None:
            progress = self._cut.cut(progress)
        token_ids: list[int] = progress.generated.token_ids.tolist()
        ended = progress.finish_reason is not None
        if progress.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._stop_token_ids:
            del token_ids[-1]
        text, found = self._stop.push(self._detokenizer.push(token_ids) + (self._detokenizer.flush() if ended else ""))
        if ended and not found:
            text += self._stop.flush()
        return self._delta(progress, text)

    def _delta(self, progress: Progress, text: str) -> Delta:
        return Delta(self._index, self._rollout_id, text, progress.generated, progress.finish_reason, progress.prompt)


class ServedRequest:
    """One HTTP request being answered: the deltas of its choices. Must be closed."""

    def __init__(
        self, served_requests: ServedRequests, requests: Sequence[GenerationRequest], builders: Sequence[_DeltaBuilder]
    ) -> None:
        self._served = served_requests
        self._open = {request.rollout_id: builder for request, builder in zip(requests, builders, strict=True)}
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Progress | GenerationError] = asyncio.Queue()

    def on_progress(self, progress: Progress | GenerationError) -> None:
        """Receive progress from the driver's thread."""
        self._loop.call_soon_threadsafe(self._enqueue, progress)

    def _enqueue(self, progress: Progress | GenerationError) -> None:
        # The id is free at the end of generation, not only after the last delta has been sent.
        if isinstance(progress, Progress) and progress.finish_reason is not None:
            self._served.forget([progress.rollout_id])
        self._queue.put_nowait(progress)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the deltas of all choices as they are generated.

        Raises: GenerationError if a generation step has failed.
        """
        while self._open:
            progress = await self._queue.get()
            if isinstance(progress, GenerationError):
                raise progress
            builder = self._open.get(progress.rollout_id)
            if builder is None:  # a stop string has ended this choice already
                continue
            delta = builder.build(progress)
            if delta.finish_reason is not None:
                del self._open[progress.rollout_id]
                if progress.finish_reason is None:  # a stop string, unknown to the driver
                    self._served.driver.abort([progress.rollout_id])
            yield delta

    def close(self) -> None:
        """Abort unfinished choices without waiting; their ids are free once the driver has aborted them."""
        unfinished = list(self._open)
        if unfinished:
            aborted = self._served.driver.abort(unfinished)
            aborted.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._served.forget, unfinished))


@dataclass(frozen=True, slots=True)
class _Active:
    """A sequence in flight. `size`: its share of the queue."""

    rollout_id: RolloutId
    client: str | None
    size: int


class ServedRequests:
    """The HTTP requests that a server is answering. An explicit rollout id has one sequence in flight at most.

    The driver knows the sequences by ids of their own, so that no client's rollout id collides with a run's.
    """

    def __init__(self, driver: GeneratorDriver, limit: QueueLimit | None = None) -> None:
        self.driver, self._limit = driver, limit or QueueLimit()
        self._active: dict[RolloutId, _Active] = {}  # by the driver's id
        self._ids: dict[RolloutId, set[RolloutId]] = {}  # the driver's ids by rollout id
        self._used: Counter[str] = Counter()  # sizes of the sequences in flight, by client

    def refusal(self, client: str, num_sequences: int = 1, num_prompt_tokens: int = 0) -> str | None:
        """Return the reason why the queue takes no more sequences of this client, or None."""
        size = self._limit.size(num_sequences, num_prompt_tokens)
        return self._limit.refusal(self._used, client, size)

    async def start(
        self,
        requests: Sequence[GenerationRequest],
        decode: Decode,
        rule: StringStopRule | None,
        *,
        chunk_tokens: int | None,
        unique: bool,
        client: str | None,
    ) -> ServedRequest:
        """Add the generation requests of one HTTP request; `rule` finds their stop strings, if they have some.

        `unique`: refuse rollout ids that are in flight. `client`: the client whose guests they are; None: a run's.
        Raises: RequestError, GenerationError; ApiError 409 if an id is in flight, 429 if the queue is full, 503 if
        generation has failed.
        """
        if self.driver.failure:
            raise ApiError(503, str(self.driver.failure), code="generation_failed")
        clash = next((request.rollout_id for request in requests if request.rollout_id in self._ids), None)
        if unique and clash is not None:
            raise ApiError(409, f"rollout {clash} is in flight already", param="rollout_id")
        if client is not None:
            num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
            if reason := self.refusal(client, len(requests), num_prompt_tokens):
                raise too_many_requests(reason)
        numbered = self.driver.numbered(requests)
        builders = [_DeltaBuilder(index, decode, request, rule) for index, request in enumerate(numbered)]
        served = ServedRequest(self, numbered, builders)
        self._note(numbered, client)
        try:
            if rule is not None:
                chunk_tokens = min(chunk_tokens or STOP_CHUNK_TOKENS, STOP_CHUNK_TOKENS)
            await asyncio.wrap_future(self.driver.add(numbered, served.on_progress, chunk_tokens, client))
        except BaseException:
            served.close()
            raise
        return served

    def ids(self, rollout_ids: Iterable[RolloutId]) -> dict[RolloutId, RolloutId]:
        """Return the rollout ids of these rollouts in flight by the driver's ids."""
        return {key: rollout_id for rollout_id in rollout_ids for key in self._ids.get(rollout_id, ())}

    def forget(self, keys: Iterable[RolloutId]) -> None:
        """Free the sequences with these ids of the driver, if they are not free yet."""
        for key in keys:
            active = self._active.pop(key, None)
            if active is None:
                continue
            self._ids[active.rollout_id].discard(key)
            if not self._ids[active.rollout_id]:
                del self._ids[active.rollout_id]
            if active.client is not None:
                self._used[active.client] -= active.size
                if not self._used[active.client]:
                    del self._used[active.client]

    def _note(self, numbered: Sequence[GenerationRequest], client: str | None) -> None:
        for request in numbered:
            size = self._limit.size(1, len(request.prompt_token_ids))
            self._active[request.rollout_id] = _Active(request.name, client, size)
            self._ids.setdefault(request.name, set()).add(request.rollout_id)
            if client is not None:
                self._used[client] += size


def too_many_requests(reason: str) -> ApiError:
    """Return the answer to a request that the queue does not take."""
    return ApiError(
        429, f"{reason}; try again later", code="rate_limit_exceeded", headers={"Retry-After": str(RETRY_AFTER_S)}
    )
