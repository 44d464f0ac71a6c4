"""Forming of a process group by the trainer: engines are invited, and the ones that are ready become its members.

consumes       the answers of the invited engines
waits for      every invited engine, at most `timeout_s`; then for connections among the engines that were ready
unblocked by   all engines ready or failed, timeout
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from midflight.errors import WeightUpdateError
from midflight.weights.engine_control import EngineControl, EngineError, engine_error
from midflight.weights.group_source import GroupSettings, GroupSource
from midflight.weights.process_group import (
    MEMBERS,
    REFUSED,
    Invitation,
    connect_links,
    local_address,
    ready_key,
    reason_of_gloo,
)

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
    try:
        return invitations.form()
    finally:
        invitations.cancel()


class _Invitations:
    """Engines that have been invited to one group."""

    def __init__(self, control: EngineControl, urls: Mapping[str, str], settings: GroupSettings) -> None:
        self._control, self._urls, self._settings = control, urls, settings
        self._address = settings.address or _address_for(urls.values())
        try:
            listener = socket.create_server((self._address, 0), family=_family(self._address))
        except OSError as error:
            raise WeightUpdateError(
                f"cannot listen on {self._address}: {error.strerror}; set weights.address to an address of the"
                " trainer's machine"
            ) from error
        self._port = listener.getsockname()[1]
        self._timeout = timedelta(seconds=settings.timeout_s)
        self._deadline_s = time.monotonic() + settings.timeout_s + _GRACE_S
        self._store = TCPStore(
            self._address, self._port, None, True, timeout=self._timeout, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        # A second connection, because a store is locked while it waits for a key.
        refusals = self._store.clone()  # type: ignore[attr-defined]
        self._answers: dict[str, Future[Any]] = {}
        self._ranks = dict(zip(urls, range(1, len(urls) + 1), strict=True))
        for name, url in urls.items():
            answer = control.invite(url, self._invitation(self._ranks[name]))
            answer.add_done_callback(lambda done, rank=self._ranks[name]: _refuse(refusals, rank, done))  # type: ignore[misc]
            self._answers[name] = answer

    def form(self) -> Formation:
        """Wait for the engines; connect to the ones that are ready."""
        keys = [ready_key(rank) for rank in self._ranks.values()]
        with contextlib.suppress(RuntimeError):  # some are late
            self._store.wait(keys, self._timeout)
        addresses = {name: self._ready_address(name) for name in self._urls}
        ready = [name for name, address in addresses.items() if address]
        failures = {name: self._why_not(name) for name in self._urls if name not in ready}
        self._store.set(MEMBERS, " ".join(f"{self._ranks[name]}@{addresses[name]}" for name in ready))
        if not ready:
            return Formation(None, failures)
        try:
            links = connect_links(
                self._store, self._address, 0, len(ready) + 1, self._invitation(0), self._settings.device
            )
        except RuntimeError as error:
            lost = {name: self._why_not(name) for name in ready if self._has_failed(name)}
            if not lost:
                lost[ready[-1]] = EngineError(f"no connection to it: {reason_of_gloo(error)}", "failed")
            return Formation(None, failures | lost)
        name = f"{self._address}:{self._port}"
        group = GroupSource(self._control, name, {name: self._urls[name] for name in ready}, self._store, links)
        return self._checked(group, failures)

    def cancel(self) -> None:
        """Give up the invitations that are not answered."""
        for answer in self._answers.values():
            answer.cancel()

    def _checked(self, group: GroupSource, failures: dict[str, EngineError]) -> Formation:
        """Wait for the members' answers to their invitations, all together no longer than for one."""
        for name in group.urls:
            with contextlib.suppress(EngineError, FutureTimeoutError):
                self._answers[name].result(max(0.0, self._deadline_s - time.monotonic()))
                continue
            failures[name] = self._why_not(name)
        if failures.keys() & group.urls.keys():
            group.close()
            return Formation(None, failures)
        return Formation(group, failures)

    def _invitation(self, rank: int) -> Invitation:
        timeout_s, backend = self._settings.timeout_s, self._settings.backend
        return Invitation(self._address, self._port, rank, len(self._urls) + 1, timeout_s, backend)

    def _ready_address(self, name: str) -> str:
        """Address of an engine that is ready; empty if it is not."""
        key = ready_key(self._ranks[name])
        if self._has_failed(name) or not self._store.check([key]):
            return ""
        address: str = self._store.get(key).decode()
        return "" if address == REFUSED else address

    def _has_failed(self, name: str) -> bool:
        answer = self._answers[name]
        return answer.done() and answer.exception() is not None

    def _why_not(self, name: str) -> EngineError:
        answer = self._answers[name]
        error = answer.exception() if answer.done() else None
        late = f"it was not ready to receive within weights.timeout_s = {self._settings.timeout_s:g} s"
        return engine_error(error) if error is not None else EngineError(late, "failed")


def _refuse(store: TCPStore, rank: int, answer: Future[Any]) -> None:
    """Mark an engine as not coming, so that nobody waits for it."""
    if answer.cancelled() or answer.exception() is not None:
        with contextlib.suppress(RuntimeError):  # the store may be closed
            store.set(ready_key(rank), REFUSED)


def _address_for(urls: Iterable[str]) -> str:
    """Address of this machine for all these servers: loopback only if all of them are here."""
    parsed = [httpx.URL(url) for url in urls]
    addresses = [local_address(url.host, url.port or 80) for url in parsed]
    return next((address for address in addresses if address not in ("127.0.0.1", "::1")), addresses[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
