"""An engine's way into a process group.

waits for      the trainer's list of the members, then for a connection to the next member and one of the previous
unblocked by   each of them; the timeout; for the list, the end of the connection to the trainer
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

import torch

from midflight.errors import WeightUpdateError
from midflight.weights.group_links import BroadcastLinks, ChainLinks, Links
from midflight.weights.group_peers import PeerListener, Purpose, connect_to_peer, receive_message
from midflight.weights.group_store import EngineStore
from midflight.weights.process_group import GroupMember, Invitation, local_address


@dataclass(frozen=True, slots=True)
class Membership:
    """Result of joining. `trainer`: a connection without messages, which ends with the group."""

    rank: int
    members: list[GroupMember]
    links: Links
    trainer: socket.socket


def join_group(invitation: Invitation, address: str, device: torch.device) -> Membership:
    """Join the group of an invitation. `address`: IP address of the trainer.

    Raises: WeightUpdateError if the group is not complete in time, or was formed without this engine.
    """
    try:
        with _Previous(invitation, local_address(address, invitation.master_port)) as previous:
            return _join(invitation, (address, invitation.master_port), device, previous)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeightUpdateError(
            f"rank {invitation.rank} cannot join {invitation.master_address}:{invitation.master_port}: {reason}"
        ) from error


class _Previous:
    """Listener for the connection of the rank before this one; it listens while the group is formed."""

    def __init__(self, invitation: Invitation, address: str) -> None:
        self._arrived: dict[int, socket.socket] = {}  # by rank in the invitation
        self._changed = threading.Condition()
        self._listener = PeerListener(address, invitation.token, invitation.rank, self._arrive)
        self.place = f"{address} {self._listener.port}"

    def wait(self, rank: int, timeout_s: float) -> socket.socket:
        """Return the connection of this rank. Raises: OSError if it does not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._arrived, timeout_s):
                raise OSError(f"no connection of the rank before it within {timeout_s:g} s")
            return self._arrived.pop(rank)

    def __enter__(self) -> _Previous:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self._arrived.values():
            connection.close()

    def _arrive(self, purpose: Purpose, rank: int, text: str, connection: socket.socket) -> None:
        with self._changed:
            replaced = self._arrived.pop(rank, None)
            self._arrived[rank] = connection
            self._changed.notify_all()
        if replaced is not None:
            replaced.close()


def _join(invitation: Invitation, master: tuple[str, int], device: torch.device, previous: _Previous) -> Membership:
    timeout_s, token, own = invitation.timeout_s, invitation.token, invitation.rank
    trainer = connect_to_peer(master, token, Purpose.JOIN, (own, 0), timeout_s, previous.place)
    try:
        trainer.settimeout(timeout_s)
        members: list[GroupMember] = receive_message(trainer, list[GroupMember])
        trainer.settimeout(None)
        ranks = [member.rank for member in members]
        if own not in ranks:
            raise ConnectionError("the process group was formed without this engine, which was late")
        rank = ranks.index(own) + 1
        if invitation.backend == "nccl":
            asking = connect_to_peer(master, token, Purpose.STORE, (own, 0), timeout_s)
            store = EngineStore(asking, timeout_s)
            links: Links = BroadcastLinks(store, rank, len(members) + 1, timeout_s, device)
        else:
            links = _chain(invitation, members, rank, previous)
    except BaseException:
        trainer.close()
        raise
    return Membership(rank, members, links, trainer)


def _chain(invitation: Invitation, members: list[GroupMember], rank: int, previous: _Previous) -> ChainLinks:
    deadline_s = time.monotonic() + invitation.timeout_s
    following = None
    if rank < len(members):
        next_one = members[rank]
        try:
            following = connect_to_peer(
                (next_one.address, next_one.port),
                invitation.token,
                Purpose.LINK,
                (invitation.rank, next_one.rank),
                invitation.timeout_s,
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectionError(f"no connection to the engine at {next_one.address}: {reason}") from error
    before = members[rank - 2].rank if rank > 1 else 0
    try:
        return ChainLinks(previous.wait(before, deadline_s - time.monotonic()), following, invitation.timeout_s)
    except BaseException:
        if following is not None:
            following.close()
        raise
