"""A process group that carries weights: rank 0, the trainer, sends; the other ranks are engines.

    trainer (group_forming.py)                            engine (group_receiver.py)
    invites engines, over HTTP                            connects to the trainer, and names its own address
    waits for: all invited engines to be ready            waits for: the members
               unblocked by: all ready or failed, timeout            unblocked by: the members, the timeout, an end
    sends the members: the engines that were ready        of the connection
    connects to the first member                          connects to the next member; waits for the previous one

An engine that is dead or slow thus costs the others one bounded wait, and they form the group without it. The list of
members gives the engines their final ranks.

tcp: a chain. Each rank receives from the rank before it and passes the bytes on to the rank after it, so the trainer
sends every byte once. NCCL: a broadcast from rank 0. Both ends of every connection prove that they know the token of
the invitation (group_peers.py). Once the group is formed, no rank listens. Nothing is ever unpickled.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Literal

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec

Backend = Literal["tcp", "nccl"]

DEFAULT_TIMEOUT_S = 60.0
NUM_AHEAD = 2  # transfers started ahead, so that the next piece follows at once


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data an engine needs to join. `timeout_s` limits the join, and the wait for a part of the weights (seconds).

    `rank` and `world_size` count all invited engines; the group may turn out smaller. `token` is a secret of the group.
    """

    master_address: str
    master_port: int
    rank: int
    world_size: int
    token: str = field(repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S
    backend: Backend = "tcp"


@dataclass(frozen=True, slots=True)
class Announcement:
    """The tensors that come next, in this order, in buckets of up to about `bucket_bytes`."""

    version: int
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """An engine of the group: its rank in the invitation, and where it listens for the rank before it (tcp)."""

    rank: int
    address: str = ""
    port: int = 0


def addresses_of(host: str, port: int) -> list[str]:
    """IP addresses of a host. Raises: WeightUpdateError if there is none, or if the name is not one of a host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WeightUpdateError(f"no address of {host!r}: {error.strerror}") from error
    except ValueError as error:  # a label that is too long, a NUL character
        raise WeightUpdateError(f"{host!r} is not the name or address of a host") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def local_address(host: str, port: int) -> str:
    """Address at which `host` can reach this machine: loopback if `host` is loopback. Sends nothing.

    Raises: WeightUpdateError if there is no route to the host.
    """
    address = addresses_of(host, port)[0]
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightUpdateError(f"no route to {host}: {error.strerror}") from error
