"""The client's end of the rollout stream: requests in flight at one server, and the tokens that have arrived.

consumes       messages of the server, in the thread of the event loop
waits for      open, abort: the server's reply
unblocked by   the reply; a lost connection; close

Tokens arrive in chunks during generation, so that a lost server loses only the tokens of unfinished chunks.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from midflight.concurrency.event_loop import Coroutines
from midflight.errors import GenerationError, GenerationLostError, MidflightError, RequestError
from midflight.generation.stream_messages import (
    PATH,
    Abort,
    Add,
    Chunks,
    FromClient,
    Reply,
    Request,
    Tokens,
    decode_from_server,
    encode,
)
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId

# Time after which a server that has not replied is asked for a sign of life, and in which it must give one.
CHECK_S = 1.5
_ABORTED = (None, FinishReason.ABORT)
_MAX_TOKENS_PER_MESSAGE = 1 << 17  # a message stays far below the limits of servers
_REQUEST_TOKENS = 64  # size of a request besides its tokens, in tokens


class _Running:
    """One request in flight and the tokens that have arrived."""

    def __init__(self, request: GenerationRequest) -> None:
        known = request.generated
        self._parts = [known] if known else []
        self._num_joined = len(known) if known else 0  # tokens in `_parts`
        self._num_repeated = self._num_joined  # tokens that came with the request and that the server has yet to repeat
        self._arrived: list[Tokens] = []  # after `_parts`; joined when they are asked for, many chunks at a time
        self.finish_reason: FinishReason | None = None
        self.failure: MidflightError | None = None

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def generated(self, start: int = 0) -> GeneratedTokens:
        if self._arrived:
            self._append(Tokens.joined(self._arrived))
            self._arrived = []
        if not self._parts:
            return GeneratedTokens.none()
        last = self._parts[-1]
        start_of_last = self._num_joined - len(last)
        if start >= start_of_last:
            return last.part(start - start_of_last)
        self._parts = [GeneratedTokens.joined(self._parts)]
        return self._parts[0].part(start)

    def add(self, tokens: Tokens) -> bool:
        """Add tokens; return True if some are new."""
        if not self._num_repeated:
            self._arrived.append(tokens)
            return len(tokens) > 0
        num_known = min(self._num_repeated, len(tokens))
        self._num_repeated -= num_known
        if num_known < len(tokens):
            self._append(tokens.generated().part(num_known))
        return num_known < len(tokens)

    def _append(self, part: GeneratedTokens) -> None:
        self._parts.append(part)
        self._num_joined += len(part)


class RolloutStream:
    """Requests in flight at one server. Thread-safe, except for the methods that the event loop calls.

    `coroutines`: of the owner, who closes them. `notify`: called when a request has ended or is lost. `learn`: receives
    the weight version of new tokens. `timeout_s`: for the connection, and for a reply of a server that gives signs of
    life; without one for CHECK_S, the server is lost.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        timeout_s: float,
        coroutines: Coroutines,
        notify: Callable[[], object],
        learn: Callable[[int], object],
    ) -> None:
        """Prepare; `connect` comes before any other call."""
        self._headers = headers
        self._connection: ClientConnection | None = None
        self._url = f"ws{base_url.removeprefix('http').rstrip('/')}{PATH}"
        self._timeout_s, self._coroutines, self._notify, self._learn = timeout_s, coroutines, notify, learn
        self._running: dict[RolloutId, _Running] = {}
        self._finished: dict[RolloutId, None] = {}  # of the running ones; so that no call looks at all of them
        self._failed: dict[RolloutId, None] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        # In the event loop only:
        self._replies: dict[int, asyncio.Future[MidflightError | None]] = {}  # by the number of the message
        self._order = asyncio.Lock()  # messages are sent in the order of the calls
        self._lost: MidflightError | None = None

    def connect(self) -> None:
        """Connect. Raises: GenerationLostError if the server cannot be reached or refuses the connection."""
        self._connection = self._coroutines.submit(self._connect()).result()
        self._coroutines.submit(self._read(self._connection))

    def __len__(self) -> int:
        return len(self._running)

    def open(
        self, requests: Sequence[GenerationRequest], chunk_tokens: int, lineage: str | None, min_version: int
    ) -> Future[None]:
        """Send these requests. The future is done when the server has accepted all of them.

        Raises: RequestError if one is in flight; (the future) RequestError if the server refuses one, and
        GenerationError. Then the server has none of them, and the caller calls `forget` or `lose`.
        """
        with self._changed:
            for request in requests:
                if request.rollout_id in self._running:
                    raise RequestError(f"request {request.rollout_id} is in flight already")
            # Now, because tokens may arrive before the reply.
            self._running |= {request.rollout_id: _Running(request) for request in requests}
        return self._coroutines.submit(self._add(requests, chunk_tokens, lineage, min_version))

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Stop these requests and return their tokens; if the server is lost, the tokens that had arrived."""
        with self._changed:
            still_open = [key for key in rollout_ids if key in self._running and not self._running[key].has_ended]
        if still_open:
            try:
                self._coroutines.submit(self._stop(still_open)).result()
            except CancelledError:
                self.lose(still_open, GenerationLostError(f"{self._url}: closed"))
            except MidflightError as error:
                self.lose(still_open, error)
        with self._changed:
            in_flight = [key for key in rollout_ids if key in self._running]
            return [self._take(key) for key in in_flight if self._running[key].finish_reason in _ABORTED]

    def forget(self, requests: Sequence[GenerationRequest]) -> None:
        """Forget requests that the server has refused."""
        with self._changed:
            for request in requests:
                self._remove(request.rollout_id)

    def generated(self, rollout_id: RolloutId, start: int) -> GeneratedTokens:
        """Return the tokens of a request that have arrived, from response position `start` on."""
        with self._changed:
            return self._running[rollout_id].generated(start)

    def take_ended(self, timeout_s: float) -> list[Completion]:
        """Remove requests that have ended and return their completions; wait up to `timeout_s` seconds for the first.

        Raises: the error of a lost request, at every call while this request is not aborted.
        """
        with self._changed:
            if self._running and timeout_s:
                self._changed.wait_for(lambda: self._finished or self._failed, timeout_s)
            if self._failed and not self._finished:
                failure = self._running[next(iter(self._failed))].failure
                assert failure is not None
                raise failure
            return [self._take(rollout_id) for rollout_id in list(self._finished)]

    def lose(self, rollout_ids: Sequence[RolloutId] | None, failure: MidflightError) -> None:
        """Fail these requests, or all, with this error; requests that have ended are left alone."""
        with self._changed:
            ids = list(self._running) if rollout_ids is None else rollout_ids
            for key in ids:
                running = self._running.get(key)
                if running is not None and not running.has_ended:
                    running.failure = failure
                    self._failed[key] = None
            self._changed.notify_all()
        self._notify()

    def fail(self, failure: MidflightError) -> None:
        """Fail all requests with this error, and all later calls."""
        self._lost = self._lost or failure
        self.lose(None, failure)

    def _take(self, rollout_id: RolloutId) -> Completion:
        running = self._running[rollout_id]
        self._remove(rollout_id)
        return Completion(rollout_id, running.generated(), running.finish_reason or FinishReason.ABORT)

    def _remove(self, rollout_id: RolloutId) -> None:
        for each in (self._running, self._finished, self._failed):
            each.pop(rollout_id, None)

    # --- in the thread of the event loop ------------------------------------------------------------------------

    async def _connect(self) -> ClientConnection:
        try:
            # Proxy settings of the environment do not apply to the machines of a run. Tokens do not compress well.
            return await connect(
                self._url,
                additional_headers=self._headers,
                compression=None,
                max_size=None,
                open_timeout=self._timeout_s,
                proxy=None,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            reason = "the admin token is wrong" if status == 403 else f"status {status}"
            raise GenerationLostError(f"{self._url}: {reason}") from error
        except (OSError, WebSocketException, ValueError) as error:
            raise GenerationLostError(f"{self._url}: {error or type(error).__name__}") from error

    def disconnect(self) -> None:
        """Disconnect without a farewell, because the server may hang."""
        if self._connection is not None:
            self._connection.transport.abort()

    async def _add(
        self, requests: Sequence[GenerationRequest], chunk_tokens: int, lineage: str | None, min_version: int
    ) -> None:
        parts = list(_parts(requests))
        async with self._order:
            replies = [
                await self._send(
                    Add(next(self._numbers), list(map(Request.of, part)), chunk_tokens, lineage, min_version)
                )
                for part in parts
            ]
        outcomes = await asyncio.gather(*map(self._outcome, replies))
        errors = [error for error in outcomes if error is not None]
        if errors:
            accepted = [part for part, error in zip(parts, outcomes, strict=True) if error is None]
            if accepted:
                await self._stop([request.rollout_id for part in accepted for request in part])
            raise errors[0]

    async def _stop(self, rollout_ids: Sequence[RolloutId]) -> None:
        async with self._order:
            reply = await self._send(Abort(next(self._numbers), list(map(int, rollout_ids))))
        error = await self._outcome(reply)
        if error is not None:
            raise error

    async def _send(self, message: FromClient) -> asyncio.Future[MidflightError | None]:
        """Send a message; return the future of its reply: the server's refusal, or None."""
        reply: asyncio.Future[MidflightError | None] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            reply.set_result(self._lost)
            return reply
        assert self._connection is not None
        self._replies[message.number] = reply
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connection.send(encode(message))
        except (OSError, WebSocketException) as error:
            self._break(self._broken(error))
        return reply

    async def _outcome(self, reply: asyncio.Future[MidflightError | None]) -> MidflightError | None:
        """Wait for a reply as long as the server gives signs of life."""
        assert self._connection is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                while not (await asyncio.wait([reply], timeout=CHECK_S))[0]:
                    async with asyncio.timeout(CHECK_S):
                        await (await self._connection.ping())
        except TimeoutError:
            self._break(GenerationLostError(f"{self._url}: it gives no answer"))
        except (OSError, WebSocketException) as error:
            self._break(self._broken(error))
        return await reply

    async def _read(self, connection: ClientConnection) -> None:
        try:
            async for frame in connection:
                self._handle(frame if isinstance(frame, bytes) else frame.encode())
            self._break(GenerationLostError(f"{self._url}: the stream broke off"))
        except (OSError, WebSocketException, msgspec.MsgspecError, ValueError) as error:
            self._break(self._broken(error))

    def _broken(self, error: Exception) -> GenerationLostError:
        return GenerationLostError(f"{self._url}: the stream broke off: {error or type(error).__name__}")

    def _break(self, failure: MidflightError) -> None:
        """Give up the connection: fail all requests and all replies that are waited for."""
        self.fail(failure)
        replies, self._replies = list(self._replies.values()), {}
        for reply in replies:
            reply.set_result(failure)

    def _handle(self, frame: bytes) -> None:
        message = decode_from_server(frame)
        if isinstance(message, Reply):
            self._settle(message)
        elif isinstance(message, Chunks):
            self._take_chunks(message)
        else:
            self.lose(None, GenerationError(message.text))

    def _settle(self, message: Reply) -> None:
        reply = self._replies.pop(message.number, None)
        if reply is None:
            return
        kind = RequestError if message.refusal == "request" else GenerationError
        reply.set_result(None if message.refusal is None else kind(message.text))

    def _take_chunks(self, message: Chunks) -> None:
        newest = -1
        with self._changed:
            for chunk in message.chunks:
                running = self._running.get(RolloutId(chunk.rollout_id))
                if running is None:
                    continue
                if running.add(chunk.tokens):
                    newest = max(newest, chunk.tokens.last_version())
                if chunk.finish_reason:
                    running.finish_reason = FinishReason(chunk.finish_reason)
                    self._finished[RolloutId(chunk.rollout_id)] = None
            has_ended = bool(self._finished)
            if has_ended:
                self._changed.notify_all()
        if has_ended:
            self._notify()
        if newest >= 0:
            self._learn(newest)


def _parts(requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
    """Split requests into messages of a bounded size."""
    part: list[GenerationRequest] = []
    num_tokens = 0
    for request in requests:
        size = _REQUEST_TOKENS + len(request.prompt_token_ids) + 3 * len(request.generated or ())
        if part and num_tokens + size > _MAX_TOKENS_PER_MESSAGE:
            yield part
            part, num_tokens = [], 0
        part.append(request)
        num_tokens += size
    if part:
        yield part
