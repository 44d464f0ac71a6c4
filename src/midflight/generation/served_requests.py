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
from midflight.generation.stop_cut import STOP_CHUNK_TOKENS, StopCut
from midflight.generation.text import Decode, Detokenizer, StopStrings
from midflight.models.stopping import StringStopRule
from midflight.types import FinishReason, GeneratedTokens, GenerationRequest, RolloutId, SamplingParams


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

    def __init__(self, index: int, decode: Decode, sampling: SamplingParams, rule: StringStopRule | None) -> None:
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
        rule: StringStopRule | None,
        *,
        chunk_tokens: int | None,
        wait: bool,
    ) -> ServedRequest:
        """Add the generation requests of one HTTP request; `rule` finds their stop strings, if they have some.

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
            self,
            rollout_ids,
            [_DeltaBuilder(index, decode, request.sampling, rule) for index, request in enumerate(requests)],
        )
        self._active.update(dict.fromkeys(rollout_ids, served))
        try:
            if rule is not None:
                chunk_tokens = min(chunk_tokens or STOP_CHUNK_TOKENS, STOP_CHUNK_TOKENS)
            added = self.driver.add(requests, served.on_progress, chunk_tokens)
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
