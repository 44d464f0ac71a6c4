"""Connections of a server: limits on their number, and on the time that a client may take.

consumes       new connections, bytes and progress of each, from uvicorn's protocols
waits for      nothing; `sweep` is called about once a second
unblocked by   -

A connection is trusted once a request of a run has come over it. Limits apply to the others. If there are too many, the
oldest one that waits for its client is closed for the new one, so that a run can always connect.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from midflight.generation.addresses import is_loopback
from midflight.generation.http_errors import ApiError

KEEPALIVE_S = 30
# Connections above the limit until their first request tells whether they are a run's.
RESERVE = 64
# Reading this many bytes of an answer within the timeout is progress.
_PROGRESS_BYTES = 1 << 14

# head: the client has yet to send a request; body: it has yet to send the rest of one; busy: it waits for the server.
Phase = Literal["head", "body", "busy"]
Address = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    """State of a connection at the last sweep. `unread_bytes`: of answers, in the buffer of the server."""

    protocol: HttpProtocol | StreamProtocol
    host: str
    phase: Phase
    since_s: float
    is_trusted: bool = False
    is_kept: bool = False  # it has had a request
    unread_bytes: int = 0
    read_s: float = 0.0  # time of the last progress of the reader


class Connections:
    """The open connections of a server. Only the event loop's thread uses them."""

    def __init__(
        self, limit: int, limit_per_host: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit_per_host`: for hosts other than this machine. `timeout_s`: for a head, a body, a part of an answer."""
        self._limit, self._limit_per_host, self.timeout_s, self._clock = limit, limit_per_host, timeout_s, clock
        self._open: dict[Address, _Connection] = {}  # the oldest first
        self._untrusted: Counter[str] = Counter()  # by host

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """True if strangers have more connections than they may have."""
        return self._untrusted.total() > self._limit

    def add(self, address: Address, protocol: HttpProtocol | StreamProtocol) -> bool:
        """Note a new connection, or the new protocol of an upgraded one; return False if it must be closed."""
        known = self._open.get(address)
        if known is not None:
            known.protocol, known.phase = protocol, "busy"
            return True
        host = address[0]
        if self._untrusted[host] >= self._limit_per_host and not is_loopback(host):
            return False
        num_strangers = self._untrusted.total()
        if num_strangers >= self._limit and not self._close_one() and num_strangers >= self._limit + RESERVE:
            return False
        now_s = self._clock()
        self._open[address] = _Connection(protocol, host, "head", now_s, read_s=now_s)
        self._untrusted[host] += 1
        return True

    def remove(self, address: Address) -> None:
        """Note the end of a connection."""
        connection = self._open.pop(address, None)
        if connection is not None and not connection.is_trusted:
            self._release(connection.host)

    def trust(self, address: Address) -> None:
        """Note that this is a connection of a run."""
        connection = self._open.get(address)
        if connection is not None and not connection.is_trusted:
            connection.is_trusted = True
            self._release(connection.host)

    def note_read(self, address: Address) -> None:
        """Note that the client has read most of what was sent."""
        connection = self._open.get(address)
        if connection is not None:
            connection.unread_bytes, connection.read_s = 0, self._clock()

    def sweep(self) -> None:
        """Close connections whose clients take too long."""
        now_s = self._clock()
        for connection in list(self._open.values()):
            if self._is_late(connection, now_s) or self._is_unread(connection, now_s):
                connection.protocol.transport.abort()

    def _is_late(self, connection: _Connection, now_s: float) -> bool:
        phase = connection.protocol.phase
        if phase != connection.phase or phase == "busy":
            connection.is_kept |= connection.phase == "busy"
            connection.phase, connection.since_s = phase, now_s
        patience_s = self.timeout_s + (KEEPALIVE_S if phase == "head" and connection.is_kept else 0)
        return not connection.is_trusted and now_s - connection.since_s > patience_s

    def _is_unread(self, connection: _Connection, now_s: float) -> bool:
        unread_bytes = connection.protocol.transport.get_write_buffer_size()
        if not unread_bytes or unread_bytes <= connection.unread_bytes - _PROGRESS_BYTES:
            connection.unread_bytes, connection.read_s = unread_bytes, now_s
        connection.unread_bytes = max(connection.unread_bytes, unread_bytes)
        return now_s - connection.read_s > self.timeout_s

    def _close_one(self) -> bool:
        """Close the oldest connection of a stranger that waits for its client; return False if there is none."""
        for address, connection in self._open.items():
            if not connection.is_trusted and connection.protocol.phase != "busy":
                connection.protocol.transport.abort()
                self.remove(address)
                return True
        return False

    def _release(self, host: str) -> None:
        self._untrusted[host] -= 1
        if not self._untrusted[host]:
            del self._untrusted[host]


class GuardedConfig(uvicorn.Config):
    """Configuration of uvicorn with protocols that keep a table of connections."""

    def __init__(self, app: Any, connections: Connections, **options: Any) -> None:
        # Tokens do not compress well, and a compressed message can be much larger than it looks.
        super().__init__(app, http=HttpProtocol, ws=StreamProtocol, ws_per_message_deflate=False, **options)
        self.connections = connections


class _InTable(asyncio.Protocol):
    """Part of a protocol that keeps its connection in the table up to date."""

    config: GuardedConfig
    client: Address | None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            self.config.connections.remove(self.client)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.client is not None:
            self.config.connections.note_read(self.client)


class HttpProtocol(_InTable, H11Protocol):
    """HTTP/1.1 connection in the table."""

    config: GuardedConfig

    @property
    def phase(self) -> Phase:
        """The side that must act next."""
        if self.conn.their_state is h11.IDLE:
            return "head"
        # While the server itself does not read, the client is not late.
        return "body" if self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused else "busy"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if self.client is None or not self.config.connections.add(self.client, self):
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer something that is not HTTP, in the OpenAI format."""
        content = msgspec.json.encode(ApiError(400, msg).body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class StreamProtocol(_InTable, WebSocketsSansIOProtocol):
    """WebSocket connection in the table."""

    config: GuardedConfig
    phase: Phase = "busy"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.client is not None:
            self.config.connections.add(self.client, self)
