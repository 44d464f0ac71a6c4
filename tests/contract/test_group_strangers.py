"""Strangers at the connections of a process group: who does not know its token gets nothing, and keeps nobody out."""

from __future__ import annotations

import hmac
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contract.weight_sending import Sender, Weights
from faults.strangers import listening_ports
from faults.tcp_proxy import Direction, ProxyLoop
from midflight.testing.weight_server import WeightServer
from midflight.weights import group_peers
from midflight.weights.group_peers import PeerListener, ProofError, Purpose, connect_to_peer, new_token
from midflight.weights.group_store import EngineStore, TrainerStore
from midflight.weights.process_group import Invitation
from midflight.weights.specs import specs_of

HOST = "127.0.0.1"
WAIT_S = 30.0
TOKEN = new_token()
RANKS = (2, 1)  # of the connector and of the listener
WEIGHTS: Weights = {"one": torch.arange(300_000.0), "two": torch.arange(7)}


class Door:
    """A listener of rank 1, and the members that have come in."""

    def __init__(self, token: str = TOKEN) -> None:
        self.entered: queue.SimpleQueue[tuple[Purpose, int, str, socket.socket]] = queue.SimpleQueue()
        self.listener = PeerListener(HOST, token, RANKS[1], lambda *member: self.entered.put(member))
        self.address = HOST, self.listener.port

    def connect(self, token: str = TOKEN, ranks: tuple[int, int] = RANKS, timeout_s: float = WAIT_S) -> socket.socket:
        return connect_to_peer(self.address, token, Purpose.LINK, ranks, timeout_s, "hello")

    def stranger(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.settimeout(WAIT_S)
        connection.sendall(data)
        return connection

    def check_member(self) -> None:
        """Check that a member gets in, and that the bytes after its proof arrive."""
        with self.connect() as member:
            purpose, rank, text, connection = self.entered.get(timeout=WAIT_S)
            with connection:
                assert (purpose, rank, text) == (Purpose.LINK, RANKS[0], "hello")
                member.sendall(b"bytes")
                assert connection.recv(5, socket.MSG_WAITALL) == b"bytes"

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door()) as door:
        yield door
        assert door.entered.empty()


def is_cut(connection: socket.socket) -> bool:
    """Read until the end; False if the other end sends more than its answer to a hello."""
    received = b""
    try:
        while chunk := connection.recv(4096):
            received += chunk
    except ConnectionResetError:
        pass
    return len(received) <= group_peers._NONCE_BYTES + group_peers._MAC_BYTES


# --- one connection ----------------------------------------------------------------------------------------------


def test_member_gets_in(door: Door) -> None:
    door.check_member()


def test_wrong_token_is_found_by_the_connector(door: Door) -> None:
    with pytest.raises(ProofError, match="does not know the token of this group"):
        door.connect(token=new_token())


def test_listener_refuses_a_connector_that_checks_nothing(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hmac, "compare_digest", _never_on_main_thread)
    with pytest.raises(ConnectionError):
        door.connect(token=new_token(), timeout_s=0.2)


def _never_on_main_thread(one: bytes, two: bytes) -> bool:
    return threading.current_thread() is threading.main_thread() or one == two


def test_member_for_another_rank_is_refused(door: Door) -> None:
    with pytest.raises(ConnectionError):
        door.connect(ranks=(2, 3), timeout_s=0.2)


def test_impostor_gets_no_proof() -> None:
    """A listener without the token may answer what it likes: the connector says nothing that depends on the token."""
    received: list[bytes] = []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            received.append(connection.recv(4096))
            connection.sendall(bytes(group_peers._NONCE_BYTES + group_peers._MAC_BYTES))
            received.append(connection.recv(4096))

    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        with pytest.raises(ProofError):
            connect_to_peer(listener.getsockname()[:2], TOKEN, Purpose.LINK, RANKS, WAIT_S)
        answered.result(WAIT_S)
    assert received[0].startswith(group_peers._MAGIC)
    assert received[1] == b""


@pytest.mark.parametrize("is_same_group", [True, False])
def test_replayed_messages_prove_nothing(door: Door, is_same_group: bool) -> None:
    recorded: list[bytes] = []

    def record(direction: Direction, chunk: bytes) -> bytes:
        if direction == "up":
            recorded.append(chunk)
        return chunk

    with closing(door if is_same_group else Door(new_token())) as earlier, ProxyLoop() as loop:
        token = earlier.listener._token
        proxy = loop.proxy(earlier.address, "recorder", record)
        connect_to_peer(proxy.address, token, Purpose.LINK, RANKS, WAIT_S).close()
        earlier.entered.get(timeout=WAIT_S)[3].close()
        if is_same_group:
            with door.stranger(b"".join(recorded)) as stranger:
                assert is_cut(stranger)
            return
    with door.stranger(b"".join(recorded)) as stranger:
        assert is_cut(stranger)
    door.check_member()


def test_mirrored_answers_prove_nothing(door: Door) -> None:
    """A stranger sends the proof of the listener back as its own."""
    hello = group_peers._HELLO.pack(group_peers._MAGIC, Purpose.LINK, *RANKS, bytes(32))
    with door.stranger(hello) as stranger:
        answer = stranger.recv(64, socket.MSG_WAITALL)
        stranger.sendall(answer[32:] + group_peers._LENGTH.pack(0))
        assert is_cut(stranger)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(range(256)) * 20, group_peers._MAGIC, bytes(60)], ids=len
)
def test_garbage_is_cut(door: Door, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_peers, "_PROOF_S", 0.2)
    with door.stranger(data) as stranger:
        assert is_cut(stranger)
    door.check_member()


# --- many connections --------------------------------------------------------------------------------------------


def test_silent_strangers_keep_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest of 300 connections are kept; each would stay for longer than the test may take."""
    monkeypatch.setattr(group_peers, "_PROOF_S", 3600.0)
    strangers = [door.stranger(group_peers._MAGIC) for _ in range(300)]
    door.check_member()
    for stranger in strangers[: -group_peers._NUM_UNPROVED]:
        assert is_cut(stranger)
    assert len(door.listener._unproved) <= group_peers._NUM_UNPROVED
    for stranger in strangers:
        stranger.close()


def test_listener_outlives_a_lack_of_file_descriptors() -> None:
    """The process may open 20 more files, and strangers open 100 connections."""
    program = (
        "import os, resource, sys\n"
        "from midflight.weights.group_peers import PeerListener\n"
        f"listener = PeerListener('{HOST}', '{TOKEN}', 1, lambda *member: print(member[:3], flush=True))\n"
        "limit = max(map(int, os.listdir('/proc/self/fd'))) + 20\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "print(listener.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout
        address = HOST, int(process.stdout.readline())
        strangers = [socket.create_connection(address) for _ in range(100)]
        connect_to_peer(address, TOKEN, Purpose.LINK, RANKS, WAIT_S).close()
        assert "LINK" in process.stdout.readline()
        for stranger in strangers:
            stranger.close()
        process.communicate()
    assert process.returncode == 0


# --- a whole group -----------------------------------------------------------------------------------------------


class Watched(WeightServer):
    """A server that shows its invitations before it accepts them."""

    shown: Callable[[dict[str, Any]], object] = staticmethod(lambda body: None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/init_process_group":
            self.shown(dict(body))
        return super().post(path, body)


def test_strangers_during_the_forming_change_nothing() -> None:
    """The first engine has joined, and the second one is held until strangers have been at all ports."""
    joined, strangers = threading.Event(), list[socket.socket]()
    before = listening_ports(os.getpid())
    first, second = Watched(specs_of(WEIGHTS)), Watched(specs_of(WEIGHTS))
    http = listening_ports(os.getpid()) - before
    opened: set[int] = set()

    def attack(body: dict[str, Any]) -> None:
        while len(listening_ports(os.getpid()) - before - http) < 2:  # of the trainer and of the first engine
            pass
        opened.update(listening_ports(os.getpid()) - before - http)
        for port in opened:
            for data in (b"", group_peers._MAGIC, bytes(range(200)), b"\0" * 53):
                strangers.append(socket.create_connection((HOST, port)))
                strangers[-1].sendall(data)
            for purpose in Purpose:
                for rank in (0, 1, 2):
                    with pytest.raises(ConnectionError):
                        connect_to_peer((HOST, port), new_token(), purpose, (1, rank), 0.05, f"{HOST} {port}")
        joined.set()

    second.shown = attack
    with closing(first), closing(second), Sender(first.url, second.url) as sender:
        sender.send(1, WEIGHTS)
        for server in (first, second):
            assert all(torch.equal(server.weights[name], tensor) for name, tensor in WEIGHTS.items())
        assert joined.is_set()
        assert len(opened) >= 2
        assert not listening_ports(os.getpid()) - before - http, "nobody listens once the group is formed"
        sender.send(2, {name: tensor + 1 for name, tensor in WEIGHTS.items()})
        assert torch.equal(second.weights["one"], WEIGHTS["one"] + 1)
    for stranger in strangers:
        stranger.close()


def test_the_group_listens_on_the_address_of_the_route_only() -> None:
    """Every address in 127.0.0.0/8 is this machine."""
    server = Watched(specs_of(WEIGHTS))

    def look(body: dict[str, Any]) -> None:
        assert body["master_address"] == HOST
        socket.create_connection((HOST, body["master_port"])).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", body["master_port"]))
        seen.append(body["master_port"])

    seen: list[int] = []
    server.shown = look
    with closing(server), Sender(server.url) as sender:
        sender.send(1, WEIGHTS)
    assert len(seen) == 1


def test_each_group_has_a_token_of_its_own_that_nobody_reads() -> None:
    server, tokens = Watched(specs_of(WEIGHTS)), list[str]()
    server.shown = lambda body: tokens.append(body["token"])
    with closing(server):
        for version in (1, 2):
            with Sender(server.url) as sender:
                sender.send(version, WEIGHTS)
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 for token in tokens)
    assert TOKEN not in repr(Invitation(HOST, 1, 1, 2, TOKEN))


# --- what NCCL exchanges -----------------------------------------------------------------------------------------


def test_ranks_exchange_values_through_the_store() -> None:
    """gloo stands in for NCCL, which needs several devices."""
    store = TrainerStore(WAIT_S)
    near, far = socket.socketpair()
    store.serve(near)
    engine = EngineStore(far, WAIT_S)

    def broadcast(store: Any, rank: int) -> torch.Tensor:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        group: Any = dist.ProcessGroupGloo(store, rank, 2, options)
        tensor = torch.full((3,), float(rank))
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(broadcast, each, rank) for rank, each in enumerate((store, engine))]
        assert [result.result(WAIT_S).tolist() for result in results] == [[0.0] * 3] * 2
    assert not engine.check(["absent"])
    with pytest.raises(Exception, match="was not ready within"):
        engine.wait(["absent"], timedelta(milliseconds=1))
    engine.set("key", b"value")
    assert store.get("key") == b"value"
    assert engine.check(["key"])
    store.close()
    with pytest.raises((OSError, EOFError)):
        engine.get("key")
    engine.close()
