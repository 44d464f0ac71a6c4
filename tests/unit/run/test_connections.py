"""The table of connections: who is closed for whom, and who takes too long."""

from __future__ import annotations

from typing import Any

from midflight.run.connections import KEEPALIVE_S, RESERVE, Connections


class Transport:
    def __init__(self) -> None:
        self.is_open, self.unread_bytes = True, 0

    def abort(self) -> None:
        self.is_open = False

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes


class Protocol:
    def __init__(self, phase: str) -> None:
        self.phase, self.transport = phase, Transport()


class Table:
    """A table with a limit of three connections, one per host, and 10 s for clients."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.connections = Connections(3, 1, 10.0, lambda: self.now_s)

    def connect(self, port: int, phase: str = "head", host: str = "127.0.0.1") -> Any:
        protocol: Any = Protocol(phase)
        if not self.connections.add((host, port), protocol):
            protocol.transport.abort()
        return protocol

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.connections.sweep()


def test_the_oldest_idle_connection_is_closed_for_a_new_one() -> None:
    table = Table()
    old = [table.connect(port, phase) for port, phase in enumerate(("busy", "head", "body"))]
    new = table.connect(10)
    assert [protocol.transport.is_open for protocol in (*old, new)] == [True, False, True, True]
    table.connect(11)
    assert [protocol.transport.is_open for protocol in (*old, new)] == [True, False, False, True]


def test_a_run_connects_although_strangers_have_all_connections() -> None:
    table = Table()
    strangers = [table.connect(port, "busy") for port in range(3 + RESERVE)]
    assert not table.connect(1000).transport.is_open, "nothing to close"
    table.connections.remove(("127.0.0.1", 5))
    run = table.connect(2000)
    table.connections.trust(("127.0.0.1", 2000))
    assert table.connections.is_full
    table.connect(3000)
    table.connect(4000)
    assert run.transport.is_open
    assert all(protocol.transport.is_open for protocol in strangers)


def test_hosts_share_the_connections() -> None:
    table = Table()
    assert table.connect(1, host="192.0.2.1").transport.is_open
    assert not table.connect(2, host="192.0.2.1").transport.is_open
    assert table.connect(3, host="192.0.2.2").transport.is_open
    table.connections.remove(("192.0.2.1", 1))
    assert table.connect(4, host="192.0.2.1").transport.is_open


def test_clients_that_take_too_long_are_cut() -> None:
    table = Table()
    head, body, busy, trusted = (
        table.connect(port, phase) for port, phase in enumerate(("head", "body", "busy", "head"))
    )
    table.connections.trust(("127.0.0.1", 3))
    table.wait(9.0)
    body.phase = "busy"
    table.wait(2.0)
    assert [protocol.transport.is_open for protocol in (head, body, busy, trusted)] == [False, True, True, True]
    body.phase = "head"  # kept for the next request
    table.wait(1.0)
    table.wait(KEEPALIVE_S)
    assert body.transport.is_open
    table.wait(11.0)
    assert not body.transport.is_open


def test_readers_that_never_read_are_cut_and_slow_ones_are_not() -> None:
    table = Table()
    never, slow, drained = (table.connect(port, "busy") for port in range(3))
    table.connections.trust(("127.0.0.1", 0))
    for protocol in (never, slow, drained):
        protocol.transport.unread_bytes = 1 << 20
    for _ in range(12):
        slow.transport.unread_bytes -= 1 << 15
        table.connections.note_read(("127.0.0.1", 2))
        table.wait(1.0)
    assert [protocol.transport.is_open for protocol in (never, slow, drained)] == [False, True, True]
