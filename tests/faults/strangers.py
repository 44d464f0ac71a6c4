"""Peers that reach the ports of the weights, but do not know the token of the group."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from midflight.weights.group_peers import Purpose, connect_to_peer, new_token

_NUM_HELD = 1100  # connections that are kept open
_PAUSE_S = 0.002  # between two looks for open ports
_REPLAYED = 8  # messages


def listening_ports(pid: int) -> set[int]:
    """Ports on which a process accepts connections over IPv4."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


class Strangers:
    """A thread that disturbs every port of some processes: with silence, garbage, wrong tokens and old messages.

    `pids`: of the processes. `spared`: their other ports. `messages`: of members of earlier groups.
    """

    def __init__(
        self, pids: Callable[[], Iterable[int]], spared: Iterable[int], messages: Callable[[], list[bytes]]
    ) -> None:
        self._pids, self._spared, self._messages = pids, set(spared), messages
        self.num_connections = 0
        self.entered: list[str] = []  # proofs that were accepted; must stay empty
        self._held: deque[socket.socket] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for connection in self._held:
            connection.close()

    def _run(self) -> None:
        attacks = itertools.cycle([self._be_silent, self._send_garbage, self._replay, self._guess])
        while not self._ended.wait(_PAUSE_S):
            for pid in self._pids():
                for port in self._ports(pid):
                    with contextlib.suppress(OSError, EOFError):
                        next(attacks)(("127.0.0.1", port))

    def _ports(self, pid: int) -> set[int]:
        try:
            return listening_ports(pid) - self._spared
        except (FileNotFoundError, PermissionError):  # the process has ended
            return set()

    def _be_silent(self, address: tuple[str, int]) -> None:
        self._hold(address, b"")

    def _send_garbage(self, address: tuple[str, int]) -> None:
        self._hold(address, bytes(range(256)))

    def _replay(self, address: tuple[str, int]) -> None:
        messages = self._messages()
        for start in range(0, len(messages), _REPLAYED):
            self._hold(address, b"".join(messages[start : start + _REPLAYED]))

    def _guess(self, address: tuple[str, int]) -> None:
        for purpose, rank in itertools.product(Purpose, (0, 1, 2)):
            self.num_connections += 1
            with connect_to_peer(address, new_token(), purpose, (1, rank), 0.01, "127.0.0.1 9"):
                self.entered.append(f"{purpose!r} to rank {rank} at port {address[1]}")

    def _hold(self, address: tuple[str, int], data: bytes) -> None:
        connection = socket.create_connection(address, 1.0)
        self._held.append(connection)
        self.num_connections += 1
        if len(self._held) > _NUM_HELD:
            self._held.popleft().close()
        connection.sendall(data)
