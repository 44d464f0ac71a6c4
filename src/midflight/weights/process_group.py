"""Weights over a separate process group: rank 0 sends, the other ranks receive; gloo, or NCCL between CUDA devices.

    sender (the trainer, rank 0)                       receiver (an engine, rank 1, 2, ...)
    connect  waits for: every receiver to be ready     join     waits for: the store, then the whole group
             unblocked by: all ready, a refusal, timeout        unblocked by: all joined, timeout
    send     waits for: every receiver to be ready     receive  waits for: one bucket after another
             unblocked by: all ready, a refusal, timeout        unblocked by: each bucket, timeout, a lost peer

The caller delivers invitations and announcements to the receivers, for example over HTTP. A receiver that accepts one
sets its key in the group's store. If the call fails, the sender's side sets the key to a refusal, so that no peer waits
for a transfer that never starts. Any error closes the group; the group can be set up again at once.

Tensors travel as bytes, in the buckets of the module `buckets`. The store holds short byte strings only: nothing is
ever unpickled.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from midflight.concurrency.background import run_in_background
from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.buckets import DEFAULT_BUCKET_BYTES, Packer, Unpacker, broadcast_all, plan_buckets
from midflight.weights.specs import specs_of

Backend = Literal["gloo", "nccl"]
Answer = TypeVar("Answer")

DEFAULT_TIMEOUT_S = 60.0
_READY, _REFUSED = "ready", "refused"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data a receiver needs to join. `timeout_s` limits the join, and each bucket (seconds)."""

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


class ProcessGroupReceiver:
    """An engine's end; the constructor joins the group.

    Raises: WeightUpdateError if the group is not complete in time.
    """

    def __init__(self, invitation: Invitation, device: torch.device | str = "cpu") -> None:
        self._timeout_s = invitation.timeout_s
        self._unpacker = Unpacker(torch.device(device) if invitation.backend == "nccl" else torch.device("cpu"))
        self._key = _key(invitation.rank)
        address, port = invitation.master_address, invitation.master_port
        try:
            # Checked first: torch fills the log with stack traces when it cannot reach a store.
            socket.create_connection((address, port), invitation.timeout_s).close()
            self._store = TCPStore(
                address, port, None, False, timeout=timedelta(seconds=self._timeout_s), wait_for_workers=False
            )
            self._store.set(self._key, _READY)
            self._group: Any = _process_group(self._store, invitation)
        except (OSError, RuntimeError) as error:
            raise WeightUpdateError(
                f"rank {invitation.rank} cannot join {address}:{port}: {reason_of_gloo(error)}"
            ) from error

    def receive(self, announcement: Announcement) -> dict[str, Tensor]:
        """Return the announced tensors. They belong to the caller until the next `receive`.

        Raises: WeightUpdateError if the sender is lost or late; the group is then closed.
        """
        buckets = plan_buckets(announcement.specs, announcement.bucket_bytes)
        memory = self._unpacker.allocate(buckets)
        try:
            self._store.set(self._key, _READY)
            broadcast_all(self._group, memory, len(buckets), self._timeout_s)
        except RuntimeError as error:
            self.close()
            raise WeightUpdateError(
                f"version {announcement.version} did not arrive: {reason_of_gloo(error)}"
            ) from error
        return {
            name: view
            for layout, bucket in zip(buckets, memory, strict=True)
            for name, view in layout.views(bucket).items()
        }

    def close(self) -> None:
        """Leave the group; peers that wait for this rank get an error at once."""
        self._group = None


class ProcessGroupSender:
    """The trainer's end. `address` is the only one listened on, and the receivers must be able to reach it."""

    def __init__(
        self,
        address: str,
        *,
        num_receivers: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        backend: Backend = "gloo",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._address, self._backend = address, backend
        self._ranks = range(1, num_receivers + 1)
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._store: TCPStore | None = None
        # A second connection, because a store is locked while it waits for a key. Opened once: connecting may query a
        # slow name server.
        self._refusals: TCPStore | None = None
        self._group: Any = None
        self._packer = Packer()

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def connect(self, invite: Callable[[Invitation], object]) -> None:
        """Set up the group. `invite` runs in one thread per receiver and blocks until that receiver has joined.

        Raises: WeightUpdateError if a receiver does not join in time; any error of `invite`.
        """
        self.close()
        listener = socket.create_server((self._address, 0), family=_family(self._address))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            self._address,
            port,
            None,
            True,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        world_size = len(self._ranks) + 1
        own, *others = (
            Invitation(self._address, port, rank, world_size, self._timeout_s, self._backend)
            for rank in range(world_size)
        )
        try:
            self._refusals = self._store.clone()  # type: ignore[attr-defined]
            answers = self._call_receivers(lambda rank: invite(others[rank - 1]))
            self._group = _process_group(self._store, own)
            self._results(answers)
        except RuntimeError as error:
            self.close()
            raise WeightUpdateError(f"the process group could not be set up: {reason_of_gloo(error)}") from error
        except BaseException:
            self.close()
            raise

    def send(
        self, version: int, weights: Mapping[str, Tensor], announce: Callable[[int, Announcement], Answer]
    ) -> list[Answer]:
        """Broadcast the weights and return every receiver's answer.

        `announce(rank, announcement)` runs in one thread per receiver and blocks until that receiver has the weights.
        The weights must not change until `send` returns.
        Raises: WeightUpdateError if a receiver is lost or late; any error of `announce`.
        """
        if self._group is None:
            raise WeightUpdateError("weights were sent before the group was set up; call connect() first")
        announcement = Announcement(version, specs_of(weights), self._bucket_bytes)
        buckets = plan_buckets(announcement.specs, self._bucket_bytes)
        try:
            answers = self._call_receivers(lambda rank: announce(rank, announcement))
            broadcast_all(
                self._group, self._packer.pack(buckets, weights, self._device(weights)), len(buckets), self._timeout_s
            )
            return self._results(answers)
        except RuntimeError as error:
            self.close()
            raise WeightUpdateError(f"version {version} was not sent: {reason_of_gloo(error)}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group and stop listening."""
        self._group = self._store = self._refusals = None

    def _device(self, weights: Mapping[str, Tensor]) -> torch.device:
        return next(iter(weights.values())).device if self._backend == "nccl" else torch.device("cpu")

    def _call_receivers(self, call: Callable[[int], Answer]) -> list[Future[Answer]]:
        """Start one call per receiver; return when every receiver has reported that it is ready."""
        assert self._store is not None
        assert self._refusals is not None
        refusals = self._refusals
        for rank in self._ranks:
            self._store.delete_key(_key(rank))

        def call_or_refuse(rank: int) -> Answer:
            try:
                return call(rank)
            except BaseException:
                with suppress(RuntimeError):  # the sender may have timed out and closed the store
                    refusals.set(_key(rank), _REFUSED)
                raise

        answers = [run_in_background(functools.partial(call_or_refuse, rank)) for rank in self._ranks]
        keys = [_key(rank) for rank in self._ranks]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise WeightUpdateError(f"not every receiver was ready within {self._timeout_s:g} s") from error
        for key, answer in zip(keys, answers, strict=True):
            if self._store.get(key) == _REFUSED.encode():
                answer.result(self._timeout_s)
        return answers

    def _results(self, answers: Sequence[Future[Answer]]) -> list[Answer]:
        try:
            return [answer.result(self._timeout_s) for answer in answers]
        except FutureTimeoutError as error:
            raise WeightUpdateError(f"a receiver gave no answer within {self._timeout_s:g} s") from error


def _key(rank: int) -> str:
    return f"midflight/{rank}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _process_group(store: TCPStore, invitation: Invitation) -> Any:
    """A group separate from torch's default group, which the trainer may use."""
    timeout = timedelta(seconds=invitation.timeout_s)
    if invitation.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, invitation.rank, invitation.world_size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    # By default gloo listens on the address that the host name resolves to.
    address = local_address(invitation.master_address, invitation.master_port)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    return dist.ProcessGroupGloo(store, invitation.rank, invitation.world_size, gloo)


def reason_of_gloo(error: Exception) -> str:
    """First sentence of an error of gloo, without the source location at its start."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
