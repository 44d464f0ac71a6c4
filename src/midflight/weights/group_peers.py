"""Connections between the members of a process group. Both ends prove that they know the group's token.

    connector                                        acceptor
    hello: purpose, ranks, nonce                ──►
                                                ◄──  nonce, MAC of "acceptor" and all of the above
    MAC of "connector" and all of the above,
    a short text                                ──►
                                                ◄──  one byte: accepted

waits for      connections, and the messages of their peers
unblocked by   the messages, 2 s without a proof, more unproved connections than `_NUM_UNPROVED`, close

The token itself is never sent. A group has a token of its own and every connection has fresh nonces, so that messages
of earlier connections prove nothing. What follows the proof is neither encrypted nor authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from midflight.concurrency.event_loop import EventLoopThread

# Unproved connections that are open at a time. Beyond, the oldest one is closed, so that silent strangers keep nobody
# out: a member needs some milliseconds for its proof.
_NUM_UNPROVED = 64
_PROOF_S = 2.0  # longest time for a proof
_RETRY_S = 0.05  # pause after a connection that was closed before the proof, or that could not be accepted
_MAX_MESSAGE_BYTES = 8 << 20
_MAX_TEXT_BYTES = 256

_MAGIC = b"midflight/2\n"
_HELLO = struct.Struct("!12sBII32s")  # purpose, rank of the connector, rank of the acceptor, nonce
_NONCE_BYTES = 32
_MAC_BYTES = 32
_LENGTH = struct.Struct("!I")
_ACCEPTED = b"\x01"


class Purpose(enum.IntEnum):
    """Use of a connection."""

    JOIN = 1  # engine to trainer; it ends with the group
    LINK = 2  # bytes of weights, to the next rank
    STORE = 3  # engine to trainer: keys and values that NCCL exchanges


class ProofError(ConnectionError):
    """The other end of a connection does not know the token."""


Accepted = Callable[[Purpose, int, str, socket.socket], object]


def new_token() -> str:
    return secrets.token_hex(32)


def connect_to_peer(
    address: tuple[str, int], token: str, purpose: Purpose, ranks: tuple[int, int], timeout_s: float, text: str = ""
) -> socket.socket:
    """Connect to a member and prove the token; return a blocking socket. `ranks`: of this member and of the other.

    A connection that the other end closes before its proof is tried again: strangers may have used up the places.
    Raises: OSError if the member cannot be reached in time; ProofError if it does not know the token.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection = socket.create_connection(address, max(_RETRY_S, deadline_s - time.monotonic()))
        try:
            connection.settimeout(max(_RETRY_S, deadline_s - time.monotonic()))
            _prove(connection, token, purpose, ranks, text)
        except (ConnectionResetError, BrokenPipeError, EOFError) as error:
            connection.close()
            if time.monotonic() + _RETRY_S >= deadline_s:
                raise ConnectionError("it closes connections before they are used") from error
            time.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise
        else:
            _prepare(connection)
            return connection


def _prove(connection: socket.socket, token: str, purpose: Purpose, ranks: tuple[int, int], text: str) -> None:
    hello = _HELLO.pack(_MAGIC, purpose, *ranks, secrets.token_bytes(_NONCE_BYTES))
    connection.sendall(hello)
    answer = _read(connection, _NONCE_BYTES + _MAC_BYTES)
    nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _mac(token, b"acceptor", hello, nonce)):
        raise ProofError("it does not know the token of this group")
    data = text.encode()
    connection.sendall(_mac(token, b"connector", hello, nonce) + _LENGTH.pack(len(data)) + data)
    _read(connection, 1)


class PeerListener:
    """Accepts connections of other members, in a thread of its own. Connections without a proof are closed.

    `accepted(purpose, rank, text, connection)` is called in that thread for each proved connection, and owns the
    blocking socket. `rank`: own rank, which the connector must name.
    Raises: OSError if this machine cannot listen on the address.
    """

    def __init__(self, address: str, token: str, rank: int, accepted: Accepted) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=2 * _NUM_UNPROVED)
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._token, self._rank, self._accepted = token, rank, accepted
        self._unproved: dict[asyncio.Task[None], None] = {}  # oldest first
        self._loop = EventLoopThread("weights group listener")
        self._loop.submit(self._listen())

    def close(self) -> None:
        """Stop listening, and close all connections without a proof."""
        self._loop.close(self._close_listener)

    async def _close_listener(self) -> None:
        self._listener.close()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # a reset, or too many open files
                await asyncio.sleep(0 if self._drop_oldest() else _RETRY_S)
                continue
            task = loop.create_task(self._examine(connection))
            self._unproved[task] = None
            task.add_done_callback(functools.partial(self._finish, connection))
            if len(self._unproved) > _NUM_UNPROVED:
                self._drop_oldest()

    def _drop_oldest(self) -> bool:
        """Close the oldest connection without a proof; return False if there is none."""
        oldest = next(iter(self._unproved), None)
        if oldest is None:
            return False
        del self._unproved[oldest]
        oldest.cancel()
        return True

    def _finish(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        """Close a connection without a proof, also if its task was canceled before it began."""
        self._unproved.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            connection.close()

    async def _examine(self, connection: socket.socket) -> None:
        async with asyncio.timeout(_PROOF_S):
            purpose, rank, text = await self._proof_of(connection)
        _prepare(connection)
        self._accepted(purpose, rank, text, connection)

    async def _proof_of(self, connection: socket.socket) -> tuple[Purpose, int, str]:
        """Return what a member wants. Raises: ValueError, OSError or EOFError for a stranger."""
        loop = asyncio.get_running_loop()
        hello = await _read_async(connection, _HELLO.size)
        magic, purpose, connector, acceptor, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or acceptor != self._rank:
            raise ValueError("this is no member")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(connection, nonce + _mac(self._token, b"acceptor", hello, nonce))
        proof = await _read_async(connection, _MAC_BYTES)
        if not hmac.compare_digest(proof, _mac(self._token, b"connector", hello, nonce)):
            raise ValueError("the proof is wrong")
        (length,) = _LENGTH.unpack(await _read_async(connection, _LENGTH.size))
        text = (await _read_async(connection, min(length, _MAX_TEXT_BYTES))).decode()
        wanted = Purpose(purpose)
        await loop.sock_sendall(connection, _ACCEPTED)
        return wanted, connector, text


def send_message(connection: socket.socket, message: object) -> None:
    """Send an object, which msgpack encodes."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket, kind: Any) -> Any:
    """Receive an object of this type. Raises: OSError, also if it is of another type; EOFError at the end."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    try:
        return msgspec.msgpack.decode(_read(connection, length), type=kind)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"a message of another protocol: {error}") from error


def end_connection(connection: socket.socket) -> None:
    """End both directions. A thread that uses the connection gets an error at once; it must close the socket."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _mac(token: str, end: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), end + hello + nonce, hashlib.sha256)


def _prepare(connection: socket.socket) -> None:
    """Make a proved connection blocking. A host that vanishes without a word ends it after some minutes."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise EOFError("it closed the connection")
        data += chunk
    return bytes(data)


async def _read_async(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(data))
        if not chunk:
            raise EOFError("it closed the connection")
        data += chunk
    return bytes(data)
