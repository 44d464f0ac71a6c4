"""Forming of a process group by the trainer: engines are invited, and the ones that are ready become its members.

consumes       the answers of the invited engines
waits for      every invited engine, at most `timeout_s`; then for connections among the engines that were ready
unblocked by   all engines ready or failed, timeout
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import httpx

from midflight.errors import WeightUpdateError
from midflight.weights.engine_control import EngineControl, EngineError, engine_error
from midflight.weights.group_links import BroadcastLinks, ChainLinks, Links
from midflight.weights.group_peers import (
    PeerListener,
    Purpose,
    connect_to_peer,
    new_token,
    send_message,
)
from midflight.weights.group_source import GroupSettings, GroupSource
from midflight.weights.group_store import TrainerStore
from midflight.weights.process_group import GroupMember, Invitation, local_address

# For the answers of engines that were ready at the last moment.
_GRACE_S = 0.5


@dataclass(slots=True)
class Formation:
    """Result of inviting engines: the group, or None if no engine has joined; and the engines that have not."""

    group: GroupSource | None
    failures: dict[str, EngineError]


def form_group(control: EngineControl, urls: Mapping[str, str], settings: GroupSettings) -> Formation:
    """Form a group with these engines, in this order; engines that are not ready in time are left out.

    Raises: WeightUpdateError if this machine cannot listen on its address, or has no route to the engines.
    """
    invitations = _Invitations(control, urls, settings)
    formation = Formation(None, {})
    try:
        formation = invitations.form()
        return formation
    finally:
        invitations.close(keep_connections=formation.group is not None)


class _Invitations:
    """Engines that have been invited to one group."""

    def __init__(self, control: EngineControl, urls: Mapping[str, str], settings: GroupSettings) -> None:
        self._control, self._urls, self._settings = control, urls, settings
        self._token = new_token()
        self._store = TrainerStore(settings.timeout_s) if settings.backend == "nccl" else None
        self._ranks = dict(zip(urls, range(1, len(urls) + 1), strict=True))
        self._ready: dict[int, GroupMember] = {}
        self._members: list[GroupMember] | None = None  # None: not decided yet
        self._connections: dict[int, socket.socket] = {}  # of the engines that have come, by rank
        self._changed = threading.Condition()
        address = settings.address or _address_for(urls.values())
        try:
            self._listener = PeerListener(address, self._token, 0, self._enter)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not the name or address of a host"
            raise WeightUpdateError(
                f"cannot listen on {address}: {reason}; set weights.address to an address of the trainer's machine"
            ) from error
        self._answers: dict[str, Future[Any]] = {}
        for name, url in urls.items():
            self._answers[name] = control.invite(url, self._invitation(self._ranks[name]))
            self._answers[name].add_done_callback(lambda _: self._notify())

    def form(self) -> Formation:
        """Wait for the engines; connect to the ones that are ready."""
        with self._changed:
            self._changed.wait_for(self._is_settled, self._settings.timeout_s)
            ready = {name: self._ready[rank] for name, rank in self._ranks.items() if self._is_ready(name)}
            self._members = list(ready.values())
        failures = {name: self._why_not(name) for name in self._urls if name not in ready}
        for member in self._members:
            with contextlib.suppress(OSError):  # its answer says that it has not joined
                send_message(self._connections[member.rank], self._members)
        deadline_s = time.monotonic() + self._settings.timeout_s + _GRACE_S
        if not ready:
            return Formation(None, failures)
        try:
            links = self._link(self._members)
        except (OSError, RuntimeError) as error:
            lost = {name: failure for name in ready if (failure := self._failure(name))}
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            first = EngineError(f"no connection to it: {reason}", "failed")
            return Formation(None, failures | (lost or {next(iter(ready)): first}))
        name = f"{self._listener.address}:{self._listener.port}"
        urls = {name: self._urls[name] for name in ready}
        group = GroupSource(self._control, name, urls, links, list(self._connections.values()))
        return self._checked(group, failures, deadline_s)

    def close(self, keep_connections: bool) -> None:
        """Stop listening, and give up the invitations that are not answered."""
        self._listener.close()
        for answer in self._answers.values():
            answer.cancel()
        for connection in () if keep_connections else self._connections.values():
            connection.close()

    def _enter(self, purpose: Purpose, rank: int, text: str, connection: socket.socket) -> None:
        """Take a connection of an engine. Thread of the listener."""
        if purpose is Purpose.STORE and self._store is not None:
            self._store.serve(connection)
            return
        connection.settimeout(self._settings.timeout_s)
        address, _, port = text.partition(" ")
        with self._changed:
            replaced, self._connections[rank] = self._connections.get(rank), connection
            if self._members is None:
                self._ready[rank] = GroupMember(rank, address, int(port))
                self._changed.notify_all()
            else:
                send_message(connection, self._members)  # it comes too late, and learns it at once
        if replaced is not None:
            replaced.close()

    def _link(self, members: list[GroupMember]) -> Links:
        """Connect to the members. Raises: OSError, RuntimeError."""
        timeout_s = self._settings.timeout_s
        if self._store is not None:
            return BroadcastLinks(self._store, 0, len(members) + 1, timeout_s, self._settings.device)
        first = members[0]
        ranks = (0, first.rank)
        following = connect_to_peer((first.address, first.port), self._token, Purpose.LINK, ranks, timeout_s)
        return ChainLinks(None, following, timeout_s)

    def _checked(self, group: GroupSource, failures: dict[str, EngineError], deadline_s: float) -> Formation:
        """Wait for the members' answers to their invitations, all together no longer than for one."""
        wait([self._answers[name] for name in group.urls], max(0.0, deadline_s - time.monotonic()))
        if all(self._answers[name].done() and not self._failure(name) for name in group.urls):
            return Formation(group, failures)
        group.close()
        # An engine without an answer is the reason why its neighbors fail.
        failed = {name: failure for name in group.urls if (failure := self._failure(name))}
        silent = {name: self._why_not(name) for name in group.urls if not self._answers[name].done()}
        silent |= {name: failure for name, failure in failed.items() if failure.kind == "gone"}
        return Formation(None, failures | (silent or failed))

    def _invitation(self, rank: int) -> Invitation:
        timeout_s, backend = self._settings.timeout_s, self._settings.backend
        address, port = self._listener.address, self._listener.port
        return Invitation(address, port, rank, len(self._urls) + 1, self._token, timeout_s, backend)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _is_settled(self) -> bool:
        return all(self._is_ready(name) or self._failure(name) for name in self._urls)

    def _is_ready(self, name: str) -> bool:
        return self._ranks[name] in self._ready and self._failure(name) is None

    def _failure(self, name: str) -> EngineError | None:
        """Return the error that an engine has answered with, if it has."""
        answer = self._answers[name]
        if not answer.done():
            return None
        if answer.cancelled():
            return EngineError("the connections to the servers are closed", "failed")
        error = answer.exception()
        return None if error is None else engine_error(error)

    def _why_not(self, name: str) -> EngineError:
        late = f"it was not ready to receive within weights.timeout_s = {self._settings.timeout_s:g} s"
        return self._failure(name) or EngineError(late, "failed")


def _address_for(urls: Iterable[str]) -> str:
    """Address of this machine for all these servers: loopback only if all of them are here."""
    parsed = [httpx.URL(url) for url in urls]
    addresses = [local_address(url.host, url.port or 80) for url in parsed]
    return next((address for address in addresses if address not in ("127.0.0.1", "::1")), addresses[0])
