"""The processes of the weights benchmark: one trainer, some engines that only receive weights, and their commands.

trainer   waits for: every engine's report of the time at which it had the weights
engine    waits for: commands of the trainer; weights

All processes are on one machine, so that their clocks are the same.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.limited_links import address_of, enter
from midflight.errors import WorkerError
from midflight.generation.registry import Entry
from midflight.testing.weight_server import WeightServer
from midflight.types import TensorSpec
from midflight.weights.process_group_transport import ProcessGroupTransport
from midflight.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from midflight.weights.specs import torch_dtype

TIMEOUT_S = 300.0
_LOOPBACK = "127.0.0.1"
_SENT_AT = 200  # offset of tcpi_bytes_sent in Linux's struct tcp_info
_TCP_INFO_BYTES = 248


@dataclass(frozen=True, slots=True)
class Load:
    """Tensors and repetitions of one measurement. `namespaces`: of the trainer and the engines, or None."""

    specs: Sequence[TensorSpec]
    num_engines: int
    rounds: int
    namespaces: Sequence[str] | None = None


def measure(load: Load) -> dict[str, Any]:
    """Measure updates and bare broadcasts in turns; return seconds and bytes of each kind, medians over rounds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_trainer_process, args=(load, theirs))
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError as error:
        raise WorkerError("the benchmark's trainer process failed") from error
    finally:
        process.join()
    return dict(result)


def _trainer_process(load: Load, report: Connection) -> None:
    if load.namespaces:
        _enter(load.namespaces[0])
    torch.set_num_threads(1)
    with _Engines(load) as engines, tempfile.TemporaryDirectory(dir=_shared_memory()) as directory:
        report.send(_measured(load, engines, Path(directory)))


def _measured(load: Load, engines: _Engines, directory: Path) -> dict[str, Any]:
    weights = {spec.name: torch.full(spec.shape, 0.5, dtype=torch_dtype(spec)) for spec in load.specs}
    entries = engines.entries()
    transport = ProcessGroupTransport(directory / "version", lambda: entries, "benchmark", print, timeout_s=TIMEOUT_S)
    group, shared = transport.sender(), SharedMemorySender(directory / "shared")
    group.announce(load.specs)
    shared.announce(load.specs)
    bare = _BareGroup(engines.address(0), load.num_engines + 1)
    engines.all("bare group", bare)
    bare.join(0, weights)
    samples: list[dict[str, float]] = []
    for version in range(load.rounds + 1):  # the first round allocates memory and connects
        samples.append(
            _round(version, weights, engines, group, bare)
            | (_shared_memory_round(version, weights, engines, shared, directory) if not load.namespaces else {})
        )
    group.close()
    shared.close()
    medians = {name: statistics.median(sample[name] for sample in samples[1:]) for name in samples[0]}
    best = min(("flat_s", "per_tensor_s"), key=lambda name: medians[name])
    medians["broadcast_s"] = medians[best]
    medians["over_broadcast"] = statistics.median(sample["seconds"] / sample[best] for sample in samples[1:])
    return medians


def _round(
    version: int, weights: dict[str, Tensor], engines: _Engines, sender: Any, bare: _BareGroup
) -> dict[str, float]:
    """Run one update, a bare broadcast of one flat tensor, and one of tensor by tensor."""
    sent_before, begun = bytes_sent(), time.monotonic()
    engines.tell("await", version)
    sender.send(version, weights.items())
    send_s = time.monotonic() - begun
    seconds = max(engines.answers()) - begun
    sample = {"seconds": seconds, "send_s": send_s, "sent_bytes": bytes_sent() - sent_before}
    for name in ("flat", "per_tensor"):
        engines.tell(name, None)
        dist.barrier()
        sent_before, begun = bytes_sent(), time.monotonic()
        bare.broadcast(name)
        sample[f"{name}_s"] = max(engines.answers()) - begun
        sample[f"{name}_bytes"] = bytes_sent() - sent_before
    return sample


def _shared_memory_round(
    version: int, weights: dict[str, Tensor], engines: _Engines, sender: SharedMemorySender, directory: Path
) -> dict[str, float]:
    """Publish in shared memory; every engine copies the weights from there."""
    begun = time.monotonic()
    sender.send(version, weights.items())
    engines.tell("shared memory", directory / "shared")
    return {"shared_memory_s": max(engines.answers()) - begun}


class _BareGroup:
    """Default process group of torch over all processes, for bare broadcasts."""

    def __init__(self, address: str, world_size: int) -> None:
        with socket.create_server((address, 0)) as listener:
            self.port = listener.getsockname()[1]
        self.address, self.world_size = address, world_size

    def join(self, rank: int, tensors: dict[str, Tensor]) -> None:
        url = f"tcp://{self.address}:{self.port}"
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=self.world_size)
        self._tensors = list(tensors.values())
        self._flat = torch.ones(sum(tensor.nbytes for tensor in self._tensors), dtype=torch.uint8)

    def broadcast(self, form: str) -> None:
        if form == "flat":
            dist.broadcast(self._flat, 0)
        else:
            for tensor in self._tensors:
                dist.broadcast(tensor, 0)


class _Engines:
    """The engine processes, as the trainer sees them."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> _Engines:
        context = multiprocessing.get_context("spawn")
        for index in range(1, self._load.num_engines + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_engine_process, args=(self._load, index, theirs), daemon=False)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            process.kill()
            process.join()

    def address(self, index: int) -> str:
        return address_of(self._load.namespaces[index]) if self._load.namespaces else _LOOPBACK

    def entries(self) -> dict[str, Entry]:
        return {f"engine-{index}": Entry(url, written_at=0) for index, url in enumerate(self.all("url", None), 1)}

    def all(self, command: str, argument: object) -> list[Any]:
        self.tell(command, argument)
        return [] if command == "bare group" else self.answers()

    def tell(self, command: str, argument: object) -> None:
        for pipe in self._pipes:
            pipe.send((command, argument))

    def answers(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(TIMEOUT_S):
                raise WorkerError(f"an engine process did not answer within {TIMEOUT_S:g} s")
            answers.append(pipe.recv())
        return answers


def _engine_process(load: Load, index: int, trainer: Connection) -> None:
    """Carry out the trainer's commands; the answer is the time at which the weights were there."""
    host = _LOOPBACK
    if load.namespaces:
        _enter(load.namespaces[index])
        host = address_of(load.namespaces[index])
    torch.set_num_threads(1)
    server = WeightServer(load.specs, host=host)
    bare: _BareGroup | None = None
    with contextlib.suppress(EOFError):
        while True:
            command, argument = trainer.recv()
            if command == "url":
                trainer.send(server.url)
            elif command == "bare group":
                bare = argument
                bare.join(index, server.weights)
            elif command == "await":
                server.wait(argument, TIMEOUT_S)
                trainer.send(time.monotonic())
            elif command == "shared memory":
                with contextlib.closing(SharedMemoryReceiver(argument)) as receiver:
                    for name, tensor in receiver.receive().tensors:
                        server.weights[name].copy_(tensor)
                trainer.send(time.monotonic())
            else:
                assert bare is not None
                dist.barrier()
                bare.broadcast(command)
                trainer.send(time.monotonic())


def _enter(namespace: str) -> None:
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # the default group of torch listens on loopback otherwise


def bytes_sent() -> int:
    """Bytes that this process has sent on its open TCP connections, resent ones included, as Linux counts them."""
    total = 0
    for connection in _own_connections():
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            total += struct.unpack_from("<Q", info, _SENT_AT)[0]
    return total


def _own_connections() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if entry.readlink().name.startswith("socket:"):
                connection = socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                    yield connection
                else:
                    connection.close()


def _shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
