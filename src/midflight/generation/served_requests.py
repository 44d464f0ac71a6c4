"""HTTP requests in flight: from GenerationRequests to deltas of text and tokens for each choice.

consumes       the driver's progress, through a queue on the event loop
waits for      progress; before the start, the end of rollouts with the same ids
unblocked by   the driver; close, which aborts unfinished choices
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
    """Text and tokens of one choice since its last delta; the last delta has the finish reason."""

    index: int
    rollout_id: RolloutId
    text: str
    generated: GeneratedTokens
    finish_reason: FinishReason | None
    prompt: GeneratedTokens | None = None  # the scored prompt, if requested, in the last delta


class _DeltaBuilder:
    """Builds the deltas of one choice: detokenizes and looks for stop strings."""

    def __init__(self, index: int, decode: Decode, stop: Sequence[str]) -> None:
        self._index, self._stop = index, StopStrings(stop) if stop else None
        self._detokenizer = Detokenizer(decode)

    def build(self, progress: Progress) -> Delta:
        """Build the next delta. Tokens after the one that completes a stop string are dropped."""
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
                kept = progress.generated.part(0, position)
                return self._delta(Progress(progress.rollout_id, kept, FinishReason.STOP), text)
        if ended:
            piece, found = self._stop.push(self._detokenizer.flush())
            text += piece + ("" if found else self._stop.flush())
        return self._delta(progress, text)

    def _delta(self, progress: Progress, text: str) -> Delta:
        return Delta(
            self._index, progress.rollout_id, text, progress.generated, progress.finish_reason, progress.prompt
        )


class ServedRequest:
    """One HTTP request being answered: the deltas of its choices. Must be closed."""

    def __init__(
        self, served_requests: ServedRequests, rollout_ids: Sequence[RolloutId], builders: Sequence[_DeltaBuilder]
    ) -> None:
        self._served = served_requests
        self._open = dict(zip(rollout_ids, builders, strict=True))
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Progress | GenerationError] = asyncio.Queue()
        self.ended = asyncio.Event()

    def on_progress(self, progress: Progress | GenerationError) -> None:
        """Receive progress from the driver's thread."""
        self._loop.call_soon_threadsafe(self._enqueue, progress)

    def _enqueue(self, progress: Progress | GenerationError) -> None:
        # The id is free at the end of generation, not only after the last delta has been sent.
        if isinstance(progress, Progress) and progress.finish_reason is not None:
            self._served.forget(self, [progress.rollout_id])
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
                del self._open[delta.rollout_id]
                if delta.rollout_id in self._served.active_ids(self):  # a stop string, unknown to the driver
                    self._served.driver.abort([delta.rollout_id])
            yield delta

    def close(self) -> None:
        """Abort unfinished choices without waiting; their ids are free once the driver has aborted them."""
        rollout_ids = self._served.active_ids(self)
        aborted = self._served.driver.abort(rollout_ids)
        aborted.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._served.forget, self, rollout_ids))


class ServedRequests:
    """The HTTP requests that a server is answering; rollout ids in flight are unique."""

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
        """Add the generation requests of one HTTP request.

        `wait`: if an id is in flight, wait for the end of that rollout instead of refusing the request.
        Raises: RequestError, GenerationError; ApiError 409 if an id is in flight, 503 if generation has failed.
        """
        if self.driver.failure:
            raise ApiError(503, str(self.driver.failure), code="generation_failed")
        rollout_ids = [request.rollout_id for request in requests]
        while (clash := next((key for key in rollout_ids if key in self._active), None)) is not None:
            if not wait:
                raise ApiError(409, f"rollout {clash} is in flight already", param="rollout_id")
            await self._active[clash].ended.wait()
        served = ServedRequest(
            self, rollout_ids, [_DeltaBuilder(index, decode, stop) for index in range(len(requests))]
        )
        self._active.update(dict.fromkeys(rollout_ids, served))
        try:
            # With stop strings, every token must be checked as soon as it is sampled.
            added = self.driver.add(requests, served.on_progress, 1 if stop else chunk_tokens)
            await asyncio.wrap_future(added)
        except BaseException:
            served.close()
            raise
        return served

    def active_ids(self, served: ServedRequest) -> list[RolloutId]:
        """Return the rollout ids of this request that are not free yet."""
        return [rollout_id for rollout_id, active in self._active.items() if active is served]

    def forget(self, served: ServedRequest, rollout_ids: Sequence[RolloutId]) -> None:
        """Free these ids, except any that now belong to another request."""
        for rollout_id in rollout_ids:
            if self._active.get(rollout_id) is served:
                del self._active[rollout_id]
        if not self.active_ids(served):
            served.ended.set()
