"""The proxy of the fault tests: forwards every byte, and fails at the byte it was told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from faults.tcp_proxy import Connection, Effect, Place, ProxyLoop, TcpProxy, in_answer

TIMEOUT_S = 30.0


@pytest.fixture
def proxies() -> Iterator[ProxyLoop]:
    with ProxyLoop() as loop:
        yield loop


@pytest.fixture
def target() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        yield listener


class Pair:
    """Both ends of a connection through a proxy."""

    def __init__(self, proxies: ProxyLoop, target: socket.socket) -> None:
        self.proxy: TcpProxy = proxies.proxy(target.getsockname(), "pair")
        self.client = socket.create_connection(self.proxy.address, TIMEOUT_S)
        self.server = target.accept()[0]
        self.server.settimeout(TIMEOUT_S)

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def pair(proxies: ProxyLoop, target: socket.socket) -> Iterator[Pair]:
    pair = Pair(proxies, target)
    yield pair
    pair.close()


def read(end: socket.socket, num_bytes: int) -> bytes:
    chunks = b""
    while len(chunks) < num_bytes and (chunk := end.recv(num_bytes - len(chunks))):
        chunks += chunk
    return chunks


def read_all(end: socket.socket) -> bytes:
    return read(end, 1 << 30)


def test_bytes_pass_in_both_directions(pair: Pair) -> None:
    data = bytes(range(256)) * 4096

    def send() -> None:
        pair.client.sendall(data)
        pair.client.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    assert read_all(pair.server) == data
    sender.join()
    pair.server.sendall(b"answer")
    pair.server.close()
    assert read_all(pair.client) == b"answer"


@pytest.mark.parametrize("after_bytes", [0, 1, 5, 99_999])
def test_a_connection_is_dropped_after_the_named_byte(proxies: ProxyLoop, pair: Pair, after_bytes: int) -> None:
    fault = proxies.arm(Place("pair", after_bytes=after_bytes), Connection.drop)
    pair.client.sendall(bytes(100_000))
    assert len(read_all(pair.server)) == after_bytes
    assert fault.struck.wait(TIMEOUT_S)


def test_bytes_are_counted_from_a_text(proxies: ProxyLoop, pair: Pair) -> None:
    proxies.arm(Place("pair", text=b"/adopt", after_bytes=3), Connection.drop)
    for piece in (b"GET /health POST /ado", b"pt", b"12", b"3456"):
        pair.client.sendall(piece)
        if piece != b"3456":
            assert read(pair.server, len(piece)) == piece
    assert read_all(pair.server) == b"3"


def test_bytes_of_several_connections_count_together(proxies: ProxyLoop, target: socket.socket) -> None:
    pairs = [Pair(proxies, target) for _ in range(2)]
    proxies.arm(Place("pair", after_bytes=7), Connection.drop)
    pairs[0].client.sendall(b"12345")
    assert read(pairs[0].server, 5) == b"12345"
    pairs[1].client.sendall(b"12345")
    assert read_all(pairs[1].server) == b"12"
    pairs[0].client.sendall(b"67")
    assert read(pairs[0].server, 2) == b"67"
    for each in pairs:
        each.close()


def test_faults_strike_in_the_order_of_their_places(proxies: ProxyLoop, pair: Pair) -> None:
    places: list[int] = []
    for after_bytes in (6, 2, 4):
        proxies.arm(
            Place("pair", after_bytes=after_bytes), lambda connection: places.append(connection.num_bytes("up"))
        )
    pair.client.sendall(b"123456789")
    assert read(pair.server, 9) == b"123456789"
    assert places == [2, 4, 6]


def test_a_reset_reaches_both_ends(proxies: ProxyLoop, pair: Pair) -> None:
    proxies.arm(Place("pair", after_bytes=2), Connection.reset)
    pair.client.sendall(b"1234")
    for end in (pair.server, pair.client):
        with pytest.raises(ConnectionResetError):
            read_all(end)


def test_the_writer_of_truncated_bytes_learns_nothing(proxies: ProxyLoop, pair: Pair) -> None:
    proxies.arm(Place("pair", after_bytes=2), Connection.truncate)
    pair.client.sendall(b"1234")
    assert read_all(pair.server) == b"12"
    pair.client.sendall(bytes(1 << 20))
    pair.server.sendall(b"still here")
    assert read(pair.client, 10) == b"still here"


def test_swallowed_bytes_never_arrive(proxies: ProxyLoop, pair: Pair) -> None:
    proxies.arm(Place("pair", after_bytes=2), Connection.swallow)
    pair.client.sendall(b"1234")
    assert read(pair.server, 2) == b"12"
    pair.server.sendall(b"answer")
    assert read(pair.client, 6) == b"answer"
    pair.client.close()
    pair.server.settimeout(0.1)
    with pytest.raises(TimeoutError):
        pair.server.recv(1)


def test_a_held_connection_goes_on_once_released(proxies: ProxyLoop, pair: Pair) -> None:
    fault = proxies.arm(Place("pair", after_bytes=2), Connection.hold)
    pair.client.sendall(b"1234")
    assert fault.struck.wait(TIMEOUT_S)
    assert read(pair.server, 2) == b"12"
    pair.server.settimeout(0.1)
    with pytest.raises(TimeoutError):
        pair.server.recv(1)
    connection = fault.connection
    assert connection is not None
    proxies.call(connection.release)
    pair.server.settimeout(TIMEOUT_S)
    assert read(pair.server, 2) == b"34"


@pytest.mark.parametrize(
    "effect", [lambda connection: connection.delay(0.01), lambda connection: connection.throttle(1e5)]
)
def test_slow_connections_lose_nothing(proxies: ProxyLoop, pair: Pair, effect: Effect) -> None:
    proxies.arm(Place("pair"), effect)
    data = bytes(range(250)) * 40
    pair.client.sendall(data)
    assert read(pair.server, len(data)) == data


def test_an_answer_is_cut_and_not_its_request(proxies: ProxyLoop, pair: Pair) -> None:
    proxies.arm(Place("pair", text=b"GET /weights"), in_answer(Connection.drop, after_bytes=4))
    pair.client.sendall(b"GET /health")
    assert read(pair.server, 11) == b"GET /health"
    pair.server.sendall(b"healthy")
    assert read(pair.client, 7) == b"healthy"
    pair.client.sendall(b"GET /weights please")
    assert read(pair.server, 19) == b"GET /weights please"
    pair.server.sendall(b"version 7")
    assert read_all(pair.client) == b"vers"


def test_a_refusing_proxy_resets_new_connections(proxies: ProxyLoop, pair: Pair) -> None:
    pair.proxy.refuses = True
    with pytest.raises(ConnectionResetError), socket.create_connection(pair.proxy.address, TIMEOUT_S) as client:
        client.recv(1)
    pair.client.sendall(b"1")
    assert read(pair.server, 1) == b"1", "an open connection goes on"


def test_a_lost_target_resets_the_client(pair: Pair, target: socket.socket) -> None:
    target.close()
    with pytest.raises(ConnectionResetError), socket.create_connection(pair.proxy.address, TIMEOUT_S) as client:
        client.recv(1)


def test_rewritten_bytes_pass_instead(proxies: ProxyLoop, target: socket.socket) -> None:
    proxy = proxies.proxy(target.getsockname(), "pair", lambda direction, chunk: chunk.replace(b"29500", b"29501"))
    with socket.create_connection(proxy.address, TIMEOUT_S) as client:
        client.sendall(b"port: 29500")
        server = target.accept()[0]
        assert read(server, 11) == b"port: 29501"
        server.close()
