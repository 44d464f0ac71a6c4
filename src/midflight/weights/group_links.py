"""Links of one rank of a process group, which carry pieces of weights.

consumes       pieces, in the order in which they were started; one thread for each direction of a chain
waits for      the rank before this one to send; the rank after this one to take
unblocked by   the bytes; a connection that ends; abort
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from midflight.weights.group_peers import end_connection
from midflight.weights.group_store import GroupStore

# The trainer finds out which rank is late and closes the group. The ranks themselves wait longer than that.
_PATIENCE = 2.0


class Transfer(Protocol):
    """A transfer of some bytes that has been started."""

    def wait(self) -> None:
        """Wait for the end of the transfer; called once. Raises: RuntimeError if it failed."""
        ...


class Links(Protocol):
    """The connections of one rank. Transfers end in the order in which they were started."""

    def send(self, piece: Tensor) -> Transfer:
        """Send the next piece of an update to the next rank. Raises: RuntimeError after `abort`."""
        ...

    def receive(self, piece: Tensor) -> Transfer: ...

    def abort(self) -> None:
        """Close all connections; running and later transfers fail at once. Callable from any thread, repeatedly."""
        ...


class ChainLinks:
    """Links of a chain over TCP: each rank receives from the rank before it and passes the bytes on to the next one.

    Takes over the sockets. `previous` is None in the trainer, `following` in the last rank.
    """

    def __init__(self, previous: socket.socket | None, following: socket.socket | None, timeout_s: float) -> None:
        patience_s = _PATIENCE * timeout_s
        self._receiving = previous and _Direction(previous, _receive, patience_s)
        self._sending = following and _Direction(following, _send, patience_s)

    def send(self, piece: Tensor) -> Transfer:
        assert self._sending
        return self._sending.start(piece)

    def receive(self, piece: Tensor) -> Transfer:
        assert self._receiving
        return self._receiving.start(piece)

    def abort(self) -> None:
        for direction in (self._receiving, self._sending):
            if direction:
                direction.close()


class _Direction:
    """One direction of a chain; `move` transfers one piece over the connection."""

    def __init__(
        self, connection: socket.socket, move: Callable[[socket.socket, memoryview], None], patience_s: float
    ) -> None:
        self._connection, self._move, self._patience_s = connection, move, patience_s
        self._pieces: queue.SimpleQueue[tuple[memoryview, Future[None]] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._closing = threading.Lock()
        threading.Thread(target=self._run, name="weights group link", daemon=True).start()

    def start(self, piece: Tensor) -> Transfer:
        future: Future[None] = Future()
        with self._closing:
            if self._is_closed:
                raise RuntimeError("the group was closed")
            self._pieces.put((piece.numpy().data, future))
        return _Queued(future, self._patience_s)

    def close(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                end_connection(self._connection)
                self._pieces.put(None)

    def _run(self) -> None:
        with self._connection:
            while item := self._pieces.get():
                piece, future = item
                try:
                    self._move(self._connection, piece)
                except OSError as error:
                    future.set_exception(RuntimeError(error.strerror or str(error)))
                else:
                    future.set_result(None)


def _send(connection: socket.socket, piece: memoryview) -> None:
    connection.sendall(piece)


def _receive(connection: socket.socket, piece: memoryview) -> None:
    while piece:
        # One call for all bytes: between two calls, this thread waits for the threads of the engine.
        num_bytes = connection.recv_into(piece, len(piece), socket.MSG_WAITALL)
        if not num_bytes:
            raise ConnectionError("it closed the connection")
        piece = piece[num_bytes:]


@dataclass(frozen=True, slots=True)
class _Queued:
    future: Future[None]
    patience_s: float

    def wait(self) -> None:
        try:
            self.future.result(self.patience_s)
        except TimeoutError as error:
            raise RuntimeError(f"a piece took longer than {self.patience_s:g} s") from error


class BroadcastLinks:
    """Links of a NCCL group: each piece is a broadcast from rank 0, ordered by a stream of its own."""

    def __init__(self, store: GroupStore, rank: int, world_size: int, timeout_s: float, device: torch.device) -> None:
        # By default, a failed broadcast ends the whole process, in a thread of torch.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", _CLEAN_UP_ONLY)
        options = dist.ProcessGroupNCCL.Options()
        self._patience = options._timeout = timedelta(seconds=_PATIENCE * timeout_s)
        self._store, self._closed = store, threading.Event()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def send(self, piece: Tensor) -> Transfer:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch.cuda.stream(self._stream):
            work = self._group.broadcast([piece], options)
        return _OnDevice(work, self._stream, self._patience, self._closed)

    receive = send

    def abort(self) -> None:
        self._closed.set()
        self._group.abort()
        self._store.close()


_CLEAN_UP_ONLY = "2"


@dataclass(frozen=True, slots=True)
class _OnDevice:
    work: Any
    stream: torch.cuda.Stream
    timeout: timedelta
    closed: threading.Event

    def wait(self) -> None:
        with torch.cuda.stream(self.stream):
            # With a timeout the call waits for the transfer itself, and raises its error.
            self.work.wait(self.timeout)
        self.stream.synchronize()
        if self.closed.is_set():  # an aborted transfer ends without its bytes
            raise RuntimeError("the group was closed")
