"""One HTTP request in flight: from GenerationRequests to deltas of text and tokens, choice by choice.

consumes       the driver's progress, through a queue on the event loop
waits for      progress; before it starts, for rollouts with the same ids to end
unblocked by   the driver; close, which aborts what has not ended
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from midflight.errors import GenerationError
from midflight.generation.driver import GeneratorDriver, Progress
from midflight.generation.http_errors import ApiError
from midflight.generation.text import Decode, Detokenizer, StopStrings
from midflight.models.text import without_stop_token
from midflight.types import FinishReason, GeneratedTokens, GenerationRequest, RolloutId


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and tokens of one choice since its last delta; the last one has the finish reason."""

    index: int
    rollout_id: RolloutId
    text: str
    generated: GeneratedTokens
    finish_reason: FinishReason | None
    prompt: GeneratedTokens | None = None  # scored, with the last one


class _Assembly:
    """The text of one choice so far."""

    def __init__(self, index: int, decode: Decode, stop: Sequence[str]) -> None:
        self._index, self._stop = index, StopStrings(stop) if stop else None
        self._detokenizer = Detokenizer(decode)

    def take(self, progress: Progress) -> Delta:
        """Tokens after the one that completes a stop string do not count."""
        token_ids: list[int] = without_stop_token(progress.generated.token_ids.tolist(), progress.finish_reason)
        ended = progress.finish_reason is not None
        if self._stop is None:
            text = self._detokenizer.push(token_ids) + (self._detokenizer.flush() if ended else "")
            return self._delta(progress, text)
        text = ""
        for position, token_id in enumerate(token_ids, 1):
            piece, found = self._stop.push(self._detokenizer.push([token_id]))
            text += piece
            if found:
                counted = progress.generated.part(0, position)
                return self._delta(Progress(progress.rollout_id, counted, FinishReason.STOP), text)
        if ended:
            piece, found = self._stop.push(self._detokenizer.flush())
            text += piece + ("" if found else self._stop.flush())
        return self._delta(progress, text)

    def _delta(self, progress: Progress, text: str) -> Delta:
        return Delta(
            self._index, progress.rollout_id, text, progress.generated, progress.finish_reason, progress.prompt
        )


class ServedRequest:
    """The choices of one HTTP request. Must be closed."""

    def __init__(
        self, served_requests: ServedRequests, rollout_ids: Sequence[RolloutId], assemblies: Sequence[_Assembly]
    ) -> None:
        self._served = served_requests
        self._open = dict(zip(rollout_ids, assemblies, strict=True))
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Progress | GenerationError] = asyncio.Queue()
        self.ended = asyncio.Event()

    def listen(self, progress: Progress | GenerationError) -> None:
        """Called by the driver's thread."""
        self._loop.call_soon_threadsafe(self._hear, progress)

    def _hear(self, progress: Progress | GenerationError) -> None:
        # Its id is free from here on, however long it takes to send what it says.
        if isinstance(progress, Progress) and progress.finish_reason is not None:
            self._served.forget(self, [progress.rollout_id])
        self._queue.put_nowait(progress)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Raises: GenerationError if a step failed."""
        while self._open:
            progress = await self._queue.get()
            if isinstance(progress, GenerationError):
                raise progress
            assembly = self._open.get(progress.rollout_id)
            if assembly is None:  # ended by a stop string before
                continue
            delta = assembly.take(progress)
            if delta.finish_reason is not None:
                del self._open[delta.rollout_id]
                if delta.rollout_id in self._served.of(self):  # a stop string, which the driver knows nothing of
                    self._served.driver.abort([delta.rollout_id])
            yield delta

    def close(self) -> None:
        """Abort what has not ended; the ids are free once the driver has seen to it. Does not wait."""
        rollout_ids = self._served.of(self)
        aborted = self._served.driver.abort(rollout_ids)
        aborted.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._served.forget, self, rollout_ids))


class ServedRequests:
    """Requests that a server is answering; no two in flight share a rollout id."""

    def __init__(self, driver: GeneratorDriver) -> None:
        self.driver = driver
        self._active: dict[RolloutId, ServedRequest] = {}

    async def start(
        self,
        requests: Sequence[GenerationRequest],
        decode: Decode,
        stop: Sequence[str],
        *,
        chunk_tokens: int | None,
        wait: bool,
    ) -> ServedRequest:
        """Add the requests. `wait` for others with the same ids to end, rather than refuse.

        Raises: RequestError, GenerationError; ApiError 409 if an id is in flight.
        """
        if self.driver.failure:
            raise ApiError(503, str(self.driver.failure), code="generation_failed")
        rollout_ids = [request.rollout_id for request in requests]
        while (clash := next((each for each in rollout_ids if each in self._active), None)) is not None:
            if not wait:
                raise ApiError(409, f"rollout {clash} is in flight already", param="rollout_id")
            await self._active[clash].ended.wait()
        served = ServedRequest(self, rollout_ids, [_Assembly(index, decode, stop) for index in range(len(requests))])
        self._active.update(dict.fromkeys(rollout_ids, served))
        try:
            # With stop strings every token has to be looked at as it comes.
            added = self.driver.add(requests, served.listen, 1 if stop else chunk_tokens)
            await asyncio.wrap_future(added)
        except BaseException:
            served.close()
            raise
        return served

    def of(self, served: ServedRequest) -> list[RolloutId]:
        """Ids of this request that are not free yet."""
        return [rollout_id for rollout_id, active in self._active.items() if active is served]

    def forget(self, served: ServedRequest, rollout_ids: Sequence[RolloutId]) -> None:
        """Free these ids, unless another request has taken them."""
        for rollout_id in rollout_ids:
            if self._active.get(rollout_id) is served:
                del self._active[rollout_id]
        if not self.of(served):
            served.ended.set()
