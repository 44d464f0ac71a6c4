"""Process group: processes that train together on one machine, and the short messages between their collectives.

consumes       one number or one short message from every rank
waits for      the slowest rank, at most COLLECTIVE_TIMEOUT_S; the death of a rank is noticed at once
unblocked by   the same call on all ranks: all ranks make the same calls in the same order

Messages are numbers and bytes; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
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

from midflight.trainer.allocator import return_large_blocks_at_once

# All other ranks wait while rank 0 writes a checkpoint.
COLLECTIVE_TIMEOUT_S = 600.0


class ProcessGroup(Protocol):
    """Membership of this process in the group of processes that train together."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def broadcast(self, value: int) -> int:
        """Return rank 0's value on all ranks."""
        ...

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank."""
        ...


class SingleProcessGroup:
    """Group of one process."""

    rank, num_ranks = 0, 1

    def broadcast(self, value: int) -> int:
        return value

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class DistributedGroup:
    """Group of several processes; parameters are sharded over `mesh`."""

    def __init__(self, rank: int, num_ranks: int, device_type: str) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.mesh: DeviceMesh = init_device_mesh(device_type, (num_ranks,))

    def broadcast(self, value: int) -> int:
        shared = torch.tensor([value])
        dist.broadcast(shared, src=0)
        return int(shared)

    def gather(self, message: bytes) -> list[bytes]:
        lengths = [int(length) for length in self._all_gather(torch.tensor([len(message)]))]
        padded = torch.frombuffer(bytearray(message.ljust(max(lengths) + 1)), dtype=torch.uint8)
        received = self._all_gather(padded)
        return [bytes(content[:length].numpy()) for content, length in zip(received, lengths, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        dist.all_gather(received, tensor)
        return received


@contextlib.contextmanager
def join_process_group(
    rendezvous: Path, rank: int, num_ranks: int, device: torch.device, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> Iterator[DistributedGroup]:
    """Join the process group and wait for all ranks.

    Messages travel over gloo on the loopback interface; gradients and parameters on CUDA travel over NCCL.

    `rendezvous`: a file that must not exist before the first rank joins.
    Raises: ConnectionError, also from the body of the `with`, if another rank is lost or late.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    # By default gloo listens on the address of the host name.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        return_large_blocks_at_once()
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
        # gloo has no exception types of its own.
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ConnectionError(f"rank {rank} lost another rank: {_reason_of_gloo(error)}") from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _reason_of_gloo(error: Exception) -> str:
    """First sentence of an error of gloo, without source locations."""
    return re.sub(r"\[/\S+:\d+\] ", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
