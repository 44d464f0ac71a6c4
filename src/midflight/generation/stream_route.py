"""The server's end of the rollout stream: many requests of a run and their tokens over one WebSocket.

consumes       messages of the client; progress of its requests, from the driver's thread
waits for      messages; progress; room in the connection
unblocked by   each of them; the end of the connection, which aborts its requests
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from midflight.errors import GenerationError, MidflightError, RequestError
from midflight.generation.driver import GeneratorDriver, Progress
from midflight.generation.stop_cut import STOP_CHUNK_TOKENS, StopCut
from midflight.generation.stream_messages import (
    PATH,
    Abort,
    Add,
    Chunk,
    Chunks,
    Failed,
    FromServer,
    Refusal,
    Reply,
    Tokens,
    decode_from_client,
    encode,
)
from midflight.models.stopping import StopRules
from midflight.types import GenerationRequest, RolloutId

_POLICY_VIOLATION, _INVALID_DATA = 1008, 1007  # close codes of RFC 6455


def stream_router(driver: GeneratorDriver, stop_rules: StopRules) -> APIRouter:
    """Create the route of the rollout stream. It needs the admin token."""
    router = APIRouter()

    @router.websocket(PATH)
    async def rollouts(websocket: WebSocket) -> None:
        # Browsers send an origin. They are no clients of a run, and would connect for any page that asks.
        # The gate has checked the admin token.
        if "origin" in websocket.headers:
            await websocket.close(_POLICY_VIOLATION)
            return
        await websocket.accept()
        driver.num_runs += 1
        try:
            await RolloutConnection(websocket, driver, stop_rules).serve()
        finally:
            driver.num_runs -= 1

    return router


@dataclass(frozen=True, slots=True)
class _Open:
    """A rollout in flight. `cut`: ends it at a stop string."""

    rollout_id: RolloutId
    cut: StopCut | None


class RolloutConnection:
    """One client. Its rollouts end with the connection. The driver knows them by ids of their own."""

    def __init__(self, websocket: WebSocket, driver: GeneratorDriver, stop_rules: StopRules) -> None:
        self._websocket, self._driver, self._stop_rules = websocket, driver, stop_rules
        self._loop = asyncio.get_running_loop()
        self._open: dict[RolloutId, _Open] = {}  # by the driver's id
        self._ids: dict[RolloutId, RolloutId] = {}  # the driver's ids by rollout id
        self._outgoing: deque[Progress | FromServer] = deque()  # appended to by the driver's thread
        self._has_outgoing = asyncio.Event()
        self._is_woken = False

    async def serve(self) -> None:
        """Serve until the client disconnects."""
        sending = asyncio.create_task(self._send_all())
        try:
            while True:
                self._handle(await self._websocket.receive_bytes())
        except (WebSocketDisconnect, KeyError):  # KeyError: a text frame
            pass
        except (msgspec.MsgspecError, ValueError) as error:
            with contextlib.suppress(RuntimeError):
                await self._websocket.close(_INVALID_DATA, str(error)[:100])
        finally:
            sending.cancel()
            self._driver.abort(list(self._open))

    def _handle(self, frame: bytes) -> None:
        message = decode_from_client(frame)
        if isinstance(message, Abort):
            ids = (self._ids.get(RolloutId(number)) for number in message.rollout_ids)
            self._reply_to(message.number, self._driver.abort([key for key in ids if key is not None]))
        else:
            self._add(message)

    def _add(self, message: Add) -> None:
        requests = self._driver.numbered(request.generation_request() for request in message.requests)
        refusal = self._refusal(message)
        if refusal is not None:
            self._put(refusal)
            return
        chunk_tokens = max(1, message.chunk_tokens)
        for request in requests:
            stop = request.sampling.stop
            cut = StopCut(self._stop_rules(stop)) if stop else None
            self._open[request.rollout_id] = _Open(request.name, cut)
            self._ids[request.name] = request.rollout_id
            if stop:
                chunk_tokens = min(chunk_tokens, STOP_CHUNK_TOKENS)
        added = self._driver.add(requests, self._on_progress, chunk_tokens)
        added.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._forget_refused, done, requests))
        self._reply_to(message.number, added)

    def _refusal(self, message: Add) -> Reply | None:
        """Refuse requests that the server must not sample: an id is in flight, or its weights are too old."""
        weights, number = self._driver.active, message.number
        ids = [RolloutId(request.rollout_id) for request in message.requests]
        taken = next((rollout_id for rollout_id in ids if rollout_id in self._ids), None)
        if taken is not None:
            return Reply(number, "request", f"request {taken} is in flight already")
        if len(set(ids)) < len(ids):
            return Reply(number, "request", "two requests have the same id; every request needs its own")
        if message.lineage is None or weights.covers(message.lineage, message.min_version):
            return None
        text = (
            f"version {message.min_version} of the weights {message.lineage!r} is needed, and the server has version"
            f" {weights.version} of {weights.lineage!r}"
        )
        return Reply(number, "generation", text)

    def _forget_refused(self, added: Future[None], requests: list[GenerationRequest]) -> None:
        if added.exception() is not None:
            for request in requests:
                self._forget(request.rollout_id)

    def _forget(self, key: RolloutId) -> None:
        rollout = self._open.pop(key, None)
        if rollout is not None:
            del self._ids[rollout.rollout_id]

    def _reply_to(self, number: int, future: Future[Any]) -> None:
        def reply(done: Future[Any]) -> None:
            error = done.exception()
            refusal: Refusal | None = None
            if error is not None:
                refusal = "request" if isinstance(error, RequestError) else "generation"
            self._put(Reply(number, refusal, str(error or "")))

        future.add_done_callback(reply)

    def _on_progress(self, progress: Progress | GenerationError) -> None:
        """Receive progress, in the driver's thread."""
        self._put(Failed(str(progress)) if isinstance(progress, MidflightError) else progress)

    def _put(self, item: Progress | FromServer) -> None:
        self._outgoing.append(item)
        if not self._is_woken:  # one call for all that is put before the event loop runs
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._has_outgoing.set)

    async def _send_all(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the reader finds out as well
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                self._is_woken = False
                for message in self._take():
                    await self._websocket.send_bytes(encode(message))

    def _take(self) -> list[FromServer]:
        """Take what is to be sent, in order, with consecutive chunks in one message."""
        messages: list[FromServer] = []
        chunks: list[Chunk] = []
        while self._outgoing:
            item = self._outgoing.popleft()
            if isinstance(item, Progress):
                chunk = self._chunk(item)
                if chunk is not None:
                    chunks.append(chunk)
                continue
            if chunks:
                messages.append(Chunks(chunks))
                chunks = []
            messages.append(item)
        if chunks:
            messages.append(Chunks(chunks))
        return messages

    def _chunk(self, progress: Progress) -> Chunk | None:
        rollout = self._open.get(progress.rollout_id)
        if rollout is None:  # a stop string has ended this rollout already
            return None
        if rollout.cut is not None:
            ends_here, progress = progress.finish_reason is None, rollout.cut.cut(progress)
            if ends_here and progress.finish_reason is not None:
                self._driver.abort([progress.rollout_id])
        if progress.finish_reason is not None:
            self._forget(progress.rollout_id)
        reason = progress.finish_reason.value if progress.finish_reason else ""
        return Chunk(rollout.rollout_id, Tokens.of(progress.generated), reason)
