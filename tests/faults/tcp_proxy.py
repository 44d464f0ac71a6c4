"""TCP proxy that fails on command, at a place that is chosen by bytes and not by time.

    client  --up-->  TcpProxy (pumps in one event loop)  --up-->  target
            <-down-                                      <-down-

consumes       chunks of bytes from either side
waits for      bytes, `Connection.release`, the end of a delay
unblocked by   either side; the test, from its own thread

A fault is armed with a place and an effect. The bytes before the place pass, then the effect runs in the thread of the
proxy, and the rest of the bytes meets its consequences. An effect may do anything, such as kill a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, Self

Direction = Literal["up", "down"]  # towards the target, towards the client
Address = tuple[str, int]

_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 256  # longer than any text of a place
_LINGER_0 = struct.pack("ii", 1, 0)  # closing the socket sends a reset


class _Half:
    """One direction of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.num_bytes = 0  # that have passed
        self.tail = b""  # end of the last chunk: a text may be split over two chunks
        self.swallows = False
        self.delay_s = 0.0
        self.bytes_per_s = 0.0  # 0: no limit
        self.open = asyncio.Event()
        self.open.set()


class Connection:
    """One connection through a proxy. Its methods are called by effects, in the thread of the proxy."""

    def __init__(self, proxy: TcpProxy, up: _Half, down: _Half) -> None:
        self.proxy = proxy
        self.struck: Direction = "up"  # direction of the fault that struck last
        self._halves: dict[Direction, _Half] = {"up": up, "down": down}

    @property
    def is_open(self) -> bool:
        return self in self.proxy.connections

    def num_bytes(self, direction: Direction) -> int:
        """Bytes that have passed."""
        return self._halves[direction].num_bytes

    def reset(self) -> None:
        """Abort both ends: each side gets ECONNRESET."""
        for half in self._halves.values():
            raw = half.writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            half.writer.transport.abort()
        self.proxy.connections.discard(self)

    def drop(self) -> None:
        """Close both ends in order: each side reads the end of the file."""
        for half in self._halves.values():
            half.writer.close()
        self.proxy.connections.discard(self)

    def truncate(self) -> None:
        """End the direction that was struck: its reader gets the end of the file, its writer goes on into nothing."""
        half = self._halves[self.struck]
        half.swallows = True
        with contextlib.suppress(OSError):
            half.writer.write_eof()

    def swallow(self) -> None:
        """Lose all further bytes of the direction that was struck. Neither side learns it."""
        self._halves[self.struck].swallows = True

    def hold(self) -> None:
        """Keep all bytes back in both directions until `release`; the buffers of both sides fill up."""
        for half in self._halves.values():
            half.open.clear()

    def release(self) -> None:
        """Let the bytes that were kept back pass, and later ones."""
        for half in self._halves.values():
            half.open.set()

    def delay(self, seconds: float) -> None:
        """Forward every further chunk this much later."""
        for half in self._halves.values():
            half.delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        """Limit both directions to this rate."""
        for half in self._halves.values():
            half.bytes_per_s = bytes_per_s

    def half(self, direction: Direction) -> _Half:
        return self._halves[direction]


Effect = Callable[[Connection], object]


@dataclass(frozen=True)
class Place:
    """A place in the traffic: `after_bytes` after the first `text`, or after the moment of arming.

    With `text`, bytes are counted from the end of the text on the connection that carries it. Without, the bytes of all
    connections of this kind are counted together.
    """

    kind: str  # of the proxy
    direction: Direction = "up"
    text: bytes = b""
    after_bytes: int = 0


@dataclass(eq=False)
class Fault:
    """An armed fault. `struck` is set once its effect has run."""

    place: Place
    effect: Effect
    only: Connection | None = None
    struck: threading.Event = field(default_factory=threading.Event)
    connection: Connection | None = None  # on which the fault struck
    _left: dict[Connection | None, int] = field(default_factory=dict)  # bytes until it strikes, once counted

    def offset(self, connection: Connection, direction: Direction, chunk: bytes) -> int | None:
        """Return the number of bytes of this chunk up to the place of the fault, None if it is not known yet."""
        place = self.place
        if (place.kind, place.direction) not in connection.proxy.ways[direction]:
            return None
        if self.only not in (None, connection):
            return None
        left = self._left.get(self._counter(connection))
        if left is not None:
            return left
        if not place.text:
            return place.after_bytes
        tail = connection.half(direction).tail
        found = (tail + chunk).find(place.text)
        if found < 0:
            return None
        return max(0, found + len(place.text) - len(tail)) + place.after_bytes

    def count(self, connection: Connection, direction: Direction, passed: bytes) -> None:
        """Count bytes that have passed."""
        offset = self.offset(connection, direction, passed)
        if offset is not None:
            self._left[self._counter(connection)] = offset - len(passed)

    def _counter(self, connection: Connection) -> Connection | None:
        return connection if self.place.text else None


class FaultPlan:
    """The armed faults of one or several proxies."""

    def __init__(self) -> None:
        self._armed: list[Fault] = []
        self._lock = threading.Lock()

    def arm(self, place: Place, effect: Effect, only: Connection | None = None) -> Fault:
        """Arm a fault, which strikes once. `only`: the connection that it may strike."""
        fault = Fault(place, effect, only)
        with self._lock:
            self._armed.append(fault)
        return fault

    def disarm(self) -> None:
        """Forget the faults that have not struck."""
        with self._lock:
            self._armed.clear()

    def next_piece(self, connection: Connection, direction: Direction, chunk: bytes) -> tuple[bytes, Fault | None]:
        """Return the start of a chunk that passes, and the fault that strikes after it."""
        with self._lock:
            offsets = [(fault.offset(connection, direction, chunk), fault) for fault in self._armed]
            due = [(offset, fault) for offset, fault in offsets if offset is not None and offset <= len(chunk)]
            offset, struck = min(due, key=lambda each: each[0], default=(len(chunk), None))
            if struck is not None:
                self._armed.remove(struck)
            for fault in self._armed:
                fault.count(connection, direction, chunk[:offset])
            return chunk[:offset], struck


Rewrite = Callable[[Direction, bytes], bytes]
Ways = Mapping[Direction, Set[tuple[str, Direction]]]


def _unchanged(direction: Direction, chunk: bytes) -> bytes:
    return chunk


class TcpProxy:
    """A listener that forwards to `target`; all proxies of a `ProxyLoop` share its thread.

    `kind` names its connections in the places of faults. `rewrite` returns the bytes that pass instead of a chunk.
    `ways`: kind and direction that the bytes of each direction count for; default: `kind` and the direction itself.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: Address,
        kind: str,
        plan: FaultPlan,
        rewrite: Rewrite = _unchanged,
        ways: Ways | None = None,
    ) -> None:
        self.target, self.kind = target, kind
        self.ways: Ways = ways or {"up": {(kind, "up")}, "down": {(kind, "down")}}
        self.connections: set[Connection] = set()
        self.num_accepted = 0
        self.refuses = False  # True: new connections are reset
        self.plan, self._rewrite, self._loop = plan, rewrite, loop
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address: Address = self.listener.getsockname()[:2]
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(), loop)

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._accept, sock=self.listener) as server:
            await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            if self.refuses:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            writer.transport.abort()
            return
        up, down = _Half(reader, far_writer), _Half(far_reader, writer)
        connection = Connection(self, up, down)
        self.connections.add(connection)
        try:
            await asyncio.gather(self._pump(connection, "up"), self._pump(connection, "down"))
        except OSError:
            connection.reset()
        else:
            connection.drop()

    async def _pump(self, connection: Connection, direction: Direction) -> None:
        half = connection.half(direction)
        while chunk := self._rewrite(direction, await half.reader.read(_CHUNK_BYTES)):
            while chunk:
                piece, fault = self.plan.next_piece(connection, direction, chunk)
                await self._forward(half, piece)
                chunk = chunk[len(piece) :]
                if fault is not None:
                    fault.connection, connection.struck = connection, direction
                    fault.effect(connection)
                    fault.struck.set()
        if not half.swallows and not half.writer.is_closing():
            await half.open.wait()
            half.writer.write_eof()

    async def _forward(self, half: _Half, chunk: bytes) -> None:
        await half.open.wait()
        if half.delay_s:
            await asyncio.sleep(half.delay_s)
        if half.bytes_per_s:
            await asyncio.sleep(len(chunk) / half.bytes_per_s)
        if chunk and not half.swallows:
            half.writer.write(chunk)
            await half.writer.drain()
        half.num_bytes += len(chunk)
        half.tail = (half.tail + chunk)[-_TAIL_BYTES:]

    def close(self) -> None:
        """Stop listening and reset all connections. Called in the thread of the proxies."""
        self._serving.cancel()
        for connection in list(self.connections):
            connection.release()
            connection.delay(0)
            connection.reset()


class ProxyLoop:
    """A thread with the event loop of any number of proxies, and the faults armed for them."""

    def __init__(self) -> None:
        self.plan = FaultPlan()
        self._loop = asyncio.new_event_loop()
        self._proxies: list[TcpProxy] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def proxy(self, target: Address, kind: str, rewrite: Rewrite = _unchanged, ways: Ways | None = None) -> TcpProxy:
        """Open a proxy. Any thread may call this, the thread of the proxies as well."""
        proxy = TcpProxy(self._loop, target, kind, self.plan, rewrite, ways)
        self._proxies.append(proxy)
        return proxy

    def arm(self, place: Place, effect: Effect) -> Fault:
        """Arm a fault, which strikes once."""
        return self.plan.arm(place, effect)

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread of the proxies, and wait for its end."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _close(self) -> None:
        """End all connections; their tasks end by themselves then."""
        for proxy in self._proxies:
            proxy.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        for proxy in self._proxies:
            proxy.listener.close()
        await asyncio.sleep(0)  # transports close their sockets in the next turn of the loop


def in_answer(effect: Effect, after_bytes: int = 0) -> Effect:
    """Return an effect that runs `effect` after this many bytes of the answer to the request that met it."""

    def arm(connection: Connection) -> None:
        proxy = connection.proxy
        proxy.plan.arm(Place(proxy.kind, "down", after_bytes=after_bytes), effect, connection)

    return arm
