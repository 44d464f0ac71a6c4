"""Processes that train together on one machine, and what they tell each other between collectives.

consumes       one number or one short message of every rank
waits for      the slowest rank, at most COLLECTIVE_TIMEOUT_S; a rank that dies is noticed at once
unblocked by   all ranks making the same call: all make the same ones in the same order

Messages are numbers and bytes; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from midflight.weights.process_group import reason_of_gloo

# Ranks wait for each other while rank 0 writes a checkpoint.
COLLECTIVE_TIMEOUT_S = 600.0
_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_LARGE_BYTES = 1 << 20


class ProcessGroup(Protocol):
    """This process among those that train together."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def broadcast(self, value: int) -> int:
        """Rank 0's value."""
        ...

    def gather(self, message: bytes) -> list[bytes]:
        """Everybody's message, by rank."""
        ...


class SingleProcessGroup:
    """A process that trains alone."""

    rank, num_ranks = 0, 1

    def broadcast(self, value: int) -> int:
        return value

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class DistributedGroup:
    """One of several; `mesh` is what parameters are sharded over."""

    def __init__(self, rank: int, num_ranks: int, device_type: str) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.mesh: DeviceMesh = init_device_mesh(device_type, (num_ranks,))

    def broadcast(self, value: int) -> int:
        agreed = torch.tensor([value])
        dist.broadcast(agreed, src=0)
        return int(agreed)

    def gather(self, message: bytes) -> list[bytes]:
        lengths = [int(each) for each in self._all(torch.tensor([len(message)]))]
        padded = torch.frombuffer(bytearray(message.ljust(max(lengths) + 1)), dtype=torch.uint8)
        return [bytes(each[:length].numpy()) for each, length in zip(self._all(padded), lengths, strict=True)]

    def _all(self, tensor: Tensor) -> list[Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        dist.all_gather(received, tensor)
        return received


@contextlib.contextmanager
def join_process_group(
    rendezvous: Path, rank: int, num_ranks: int, device: torch.device, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> Iterator[DistributedGroup]:
    """The group, once all ranks are there. `rendezvous`: a file that did not exist before the first of them came.

    Messages travel over gloo on the loopback interface, gradients and parameters on CUDA over NCCL.
    Raises: ConnectionError, also from the body of the `with`, if another rank is lost or late.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    # By default gloo listens on whatever the host name stands for.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _give_back_freed_memory()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=FileStore(str(rendezvous), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        yield DistributedGroup(rank, num_ranks, device.type)
    except RuntimeError as error:
        # Gloo has no errors of its own.
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ConnectionError(f"rank {rank} lost another one: {reason_of_gloo(error)}") from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _give_back_freed_memory() -> None:
    """Make glibc return large blocks to the system at once.

    By itself it keeps the memory that whole layers were in, in pieces that the next ones do not fit into: more than
    sharding saves.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
