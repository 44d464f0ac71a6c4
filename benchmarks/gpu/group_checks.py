"""Connections of the weight group from device memory: TCP over host memory, and NCCL as far as one device allows."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import time

import torch

from benchmarks.gpu.setting import NotApplicableError, Row, Setting
from benchmarks.roofline import synchronize
from midflight.weights.group_links import BroadcastLinks, ChainLinks, Links
from midflight.weights.group_peers import PeerListener, Purpose, connect_to_peer, new_token
from midflight.weights.group_store import EngineStore, TrainerStore

_ADDRESS = "127.0.0.1"
_TIMEOUT_S = 15.0
_SIZES = (1, 4096, 40_000_000)  # bytes


def tcp_from_the_device(setting: Setting) -> list[Row]:
    """Send bytes of device memory to another process over TCP, by way of host memory."""
    rows = _two_ranks(setting, "tcp")
    assert all(row["equal"] for row in rows), f"other bytes arrived: {rows}"
    return rows


def nccl_on_one_rank(setting: Setting) -> list[Row]:
    """Make a NCCL group of one rank and broadcast to itself: the library loads and works on this device."""
    _needs_cuda(setting)
    started = time.perf_counter()
    links = BroadcastLinks(TrainerStore(_TIMEOUT_S), 0, 1, _TIMEOUT_S, setting.on)
    piece = torch.arange(1 << 20, device=setting.on, dtype=torch.int32).view(torch.uint8)
    expected = piece.clone()
    torch.cuda.synchronize()  # links have a stream of their own
    links.send(piece).wait()
    assert torch.equal(piece, expected), "a broadcast to itself changed the bytes"
    seconds = time.perf_counter() - started
    links.abort()
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return [{"nccl": ".".join(map(str, version)), "seconds": seconds}]


def nccl_twice_on_one_device(setting: Setting) -> list[Row]:
    """Let two ranks share the device, which NCCL refuses: there is an error within the timeout, and no hang."""
    _needs_cuda(setting)
    if torch.cuda.device_count() > 1:
        rows = _two_ranks(setting, "nccl")
        assert all(row["equal"] for row in rows), f"other bytes arrived: {rows}"
        return [{"devices": torch.cuda.device_count(), **row} for row in rows]
    started = time.perf_counter()
    try:
        rows = _two_ranks(setting, "nccl")
    except RuntimeError as error:
        seconds = time.perf_counter() - started
        assert seconds < 2.5 * _TIMEOUT_S, f"the error came after {seconds:.0f} s"
        return [{"refused": str(error).splitlines()[0], "seconds": seconds}]
    raise AssertionError(f"two ranks shared one device: {rows}")


def _needs_cuda(setting: Setting) -> None:
    if not setting.is_cuda:
        raise NotApplicableError("NCCL needs a CUDA device")


def _two_ranks(setting: Setting, backend: str) -> list[Row]:
    """Send pieces of several sizes to a second process. Raises: RuntimeError with the reason of either rank."""
    token = new_token()
    connections: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    listener = PeerListener(_ADDRESS, token, 0, lambda purpose, rank, text, connection: connections.put(connection))
    other = torch.device("cuda", torch.cuda.device_count() - 1) if backend == "nccl" else torch.device("cpu")
    command = [sys.executable, "-m", "benchmarks.gpu.group_checks", str(listener.port), backend, str(other)]
    receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdin
        print(token, file=receiver.stdin, flush=True)
        links = _links_of_sender(connections.get(timeout=2 * _TIMEOUT_S), backend, setting.on)
        pieces = _pieces(setting.on)
        synchronize(setting.on)
        for piece in pieces:
            links.send(piece if backend == "nccl" else piece.cpu()).wait()
        output, _ = receiver.communicate(timeout=2 * _TIMEOUT_S)
    except (subprocess.TimeoutExpired, queue.Empty) as error:
        raise RuntimeError("the receiving rank gave no answer") from error
    finally:
        receiver.kill()
        receiver.wait()
        listener.close()
    answer = json.loads(output.strip().splitlines()[-1])
    if answer["error"]:
        raise RuntimeError(answer["error"])
    rows: list[Row] = answer["rows"]
    return rows


def _links_of_sender(connection: socket.socket, backend: str, device: torch.device) -> Links:
    if backend == "tcp":
        return ChainLinks(None, connection, _TIMEOUT_S)
    store = TrainerStore(_TIMEOUT_S)
    store.serve(connection)
    return BroadcastLinks(store, 0, 2, _TIMEOUT_S, device)


def _pieces(device: torch.device) -> list[torch.Tensor]:
    return [(torch.arange(size, device=device) % 251).to(torch.uint8) for size in _SIZES]


def _receive(port: int, backend: str, device: torch.device) -> list[Row]:
    connection = connect_to_peer((_ADDRESS, port), input(), Purpose.LINK, (1, 0), _TIMEOUT_S)
    if backend == "tcp":
        links: Links = ChainLinks(connection, None, _TIMEOUT_S)
    else:
        links = BroadcastLinks(EngineStore(connection, _TIMEOUT_S), 1, 2, _TIMEOUT_S, device)
    rows: list[Row] = []
    for expected in _pieces(device):
        piece = torch.zeros_like(expected)
        synchronize(device)
        started = time.perf_counter()
        links.receive(piece).wait()
        seconds = time.perf_counter() - started
        equal = torch.equal(piece, expected)
        rows.append({"backend": backend, "bytes": len(piece), "seconds": seconds, "equal": equal})
    return rows


if __name__ == "__main__":
    try:
        print(json.dumps({"rows": _receive(int(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3])), "error": ""}))
    except Exception as failure:
        print(json.dumps({"rows": [], "error": f"{type(failure).__name__}: {failure}"}))
