"""A process group that carries weights: rank 0, the trainer, sends; the other ranks are engines.

    trainer (group_forming.py)                            engine (group_receiver.py)
    invites engines, over HTTP                            connects to the store of the group
    waits for: all invited engines to be ready            sets ready/RANK to its address
               unblocked by: all ready or failed, timeout
    sets `members`: the engines that were ready           waits for: `members`; unblocked by: the key, timeout
    connects to all members                               connects to all members

An engine that is dead or slow thus costs the others one bounded wait, and they form the group without it. The key
`members` gives the engines their final ranks.

gloo: a chain. Each rank receives from the rank before it and passes the bytes on to the rank after it, so the trainer
sends every byte once. NCCL: a broadcast from rank 0. The store holds short strings; nothing is ever unpickled.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec

Backend = Literal["gloo", "nccl"]

DEFAULT_TIMEOUT_S = 60.0
MEMBERS = "midflight/members"  # key of the store: "RANK@ADDRESS RANK@ADDRESS ...", in the order of the chain
REFUSED = "-"  # value of a key ready/RANK: the invitation of this engine has failed
NUM_AHEAD = 2  # transfers started ahead, so that the next piece follows at once
# The trainer finds out which rank is late and closes the group. The ranks themselves wait longer than that.
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data an engine needs to join. `timeout_s` limits the join, and the wait for a part of the weights (seconds).

    `rank` and `world_size` count all invited engines; the group may turn out smaller.
    """

    master_address: str
    master_port: int
    rank: int
    world_size: int
    timeout_s: float = DEFAULT_TIMEOUT_S
    backend: Backend = "gloo"


@dataclass(frozen=True, slots=True)
class Announcement:
    """The tensors that come next, in this order, in buckets of up to about `bucket_bytes`."""

    version: int
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int


class Transfer(Protocol):
    """A transfer of some bytes that has been started."""

    def wait(self) -> None:
        """Wait for the end of the transfer; called once. Raises: RuntimeError if it failed."""
        ...


class Links(Protocol):
    """The connections of one rank. Transfers end in the order in which they were started."""

    def send(self, piece: Tensor, index: int) -> Transfer:
        """Send the `index`-th piece of an update to the next rank."""
        ...

    def receive(self, piece: Tensor, index: int) -> Transfer: ...

    def abort(self) -> None:
        """Close all connections; running and later transfers fail at once. Callable from any thread, repeatedly."""
        ...


def ready_key(rank: int) -> str:
    return f"midflight/ready/{rank}"


def local_address(host: str, port: int) -> str:
    """Address at which `host` can reach this machine: loopback if `host` is loopback. Sends nothing.

    Raises: WeightUpdateError if there is no route to the host.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightUpdateError(f"no route to {host}: {error.strerror}") from error


def connect_links(
    store: TCPStore, address: str, rank: int, world_size: int, invitation: Invitation, device: torch.device
) -> Links:
    """Connect to all other ranks, in a group separate from torch's default group. `address` is this machine's.

    Raises: RuntimeError if a rank is missing after the timeout.
    """
    if invitation.backend == "nccl":
        return _Broadcasts(store, rank, world_size, invitation.timeout_s, device)
    return _Chain(store, address, rank, world_size, invitation.timeout_s)


class _Chain:
    """Links of a gloo group."""

    def __init__(self, store: TCPStore, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        # By default gloo listens on the address that the host name resolves to.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        self._rank, self._world_size = rank, world_size
        self._patience = timedelta(seconds=_PATIENCE * timeout_s)

    def send(self, piece: Tensor, index: int) -> Transfer:
        return _Waiting(self._group.send([piece], self._rank + 1, index), self._patience)

    def receive(self, piece: Tensor, index: int) -> Transfer:
        return _Waiting(self._group.recv([piece], self._rank - 1, index), self._patience)

    def abort(self) -> None:
        # gloo has no call for this, but if a transfer times out, gloo closes all connections of the group. On a
        # connection that is closed already, a transfer fails without a timeout; then the next rank is tried.
        for other in range(self._world_size):
            if other == self._rank:
                continue
            try:
                self._group.recv([torch.empty(1)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    return


_NEVER_SENT = (1 << 31) - 1  # a tag


class _Broadcasts:
    """Links of a NCCL group: each piece is a broadcast from rank 0, ordered by a stream of its own."""

    def __init__(self, store: TCPStore, rank: int, world_size: int, timeout_s: float, device: torch.device) -> None:
        # By default, a failed broadcast ends the whole process, in a thread of torch.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", _CLEAN_UP_ONLY)
        options = dist.ProcessGroupNCCL.Options()
        self._patience = options._timeout = timedelta(seconds=_PATIENCE * timeout_s)
        self._closed = threading.Event()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def send(self, piece: Tensor, index: int) -> Transfer:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch.cuda.stream(self._stream):
            work = self._group.broadcast([piece], options)
        return _OnDevice(work, self._stream, self._patience, self._closed)

    receive = send

    def abort(self) -> None:
        self._closed.set()
        self._group.abort()


_CLEAN_UP_ONLY = "2"


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: Any
    timeout: timedelta

    def wait(self) -> None:
        self.work.wait(self.timeout)


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


def reason_of_gloo(error: Exception) -> str:
    """First sentence of an error of gloo, without source locations."""
    return re.sub(r"\[/\S+:\d+\] ", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
