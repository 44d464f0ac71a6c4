"""Duration of a transfer of weights from the trainer to an engine in another process, for each transport.

Every transport moves the same tensors. The same run also measures a memory copy of the same size and, for the process
group, a bare broadcast of one flat tensor. Rows are medians over rounds.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from midflight.errors import RecipeError, WorkerError
from midflight.report.machine import describe_machine, num_cores
from midflight.types import TensorSpec
from midflight.weights.files import FileReceiver, FileSender
from midflight.weights.process_group import Announcement, Invitation, ProcessGroupReceiver, ProcessGroupSender
from midflight.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from midflight.weights.specs import specs_of, torch_dtype

_TIMEOUT_S = 120.0
_BROADCAST = "broadcast"  # message that asks the other process to join a bare broadcast


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Shapes of a Llama with tied embeddings."""

    hidden: int
    ffn: int
    layers: int
    key_value: int  # columns of the key and value projections
    vocabulary: int

    def specs(self, dtype: str) -> list[TensorSpec]:
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocabulary, self.hidden), "norm": (self.hidden,)}
        for layer in range(self.layers):
            square, wide = (self.hidden, self.hidden), (self.ffn, self.hidden)
            narrow = (self.key_value, self.hidden)
            parts: dict[str, tuple[int, ...]] = {
                "q": square,
                "k": narrow,
                "v": narrow,
                "o": square,
                "gate": wide,
                "up": wide,
                "down": wide[::-1],
            }
            parts |= {"input_norm": (self.hidden,), "post_norm": (self.hidden,)}
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
        return [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]


# A toy model, SmolLM2-135M and Llama-3.2-1B.
SIZES = {
    "1M": ModelSize(hidden=128, ffn=512, layers=4, key_value=64, vocabulary=128),
    "135M": ModelSize(hidden=576, ffn=1536, layers=30, key_value=192, vocabulary=49152),
    "1B": ModelSize(hidden=2048, ffn=8192, layers=16, key_value=512, vocabulary=128256),
}


def bench_weights(sizes: tuple[str, ...], dtype: str, rounds: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all transports; return a row per size and transport.

    `of_memcpy` is the rate of publishing over the rate of a memory copy. `over_broadcast` is the time of publishing
    over the time of a bare broadcast, the median over rounds.
    Units: seconds; `*_gb_per_s`: 10^9 bytes per second.
    Raises: RecipeError if a size does not exist; WorkerError if the receiving process fails.
    """
    unknown = [size for size in sizes if size not in SIZES]
    if unknown:
        raise RecipeError(f"--sizes: there is no {unknown[0]!r}; known are {', '.join(SIZES)}")
    torch.set_num_threads(num_cores())
    rows = []
    for size in sizes:
        specs = SIZES[size].specs(dtype)
        weights = {spec.name: torch.full(spec.shape, 0.5, dtype=torch_dtype(spec)) for spec in specs}
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        copy_s = _memcpy_seconds(num_bytes, rounds)
        for transport in _TRANSPORTS:
            row = {
                "size": size,
                "parameters": sum(math.prod(spec.shape) for spec in specs),
                "dtype": dtype,
                "transport": transport,
                **_measure(transport, weights, rounds),
            }
            row["publish_gb_per_s"] = num_bytes / row["publish_s"] / 1e9
            row["memcpy_gb_per_s"] = num_bytes / copy_s / 1e9
            row["of_memcpy"] = copy_s / row["publish_s"]
            rows.append(row)
            report(f"{size}, {transport}: {row['publish_s']:.4f} s, {row['publish_gb_per_s']:.2f} GB/s")
    return {"machine": describe_machine(), "rounds": rounds, "rows": rows}


def _memcpy_seconds(num_bytes: int, rounds: int) -> float:
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    return _median_seconds(lambda: target.copy_(source), rounds)


def _measure(transport: str, weights: dict[str, Tensor], rounds: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with _directory() as directory:
        process = context.Process(target=_receiving, args=(transport, directory, theirs))
        process.start()
        try:
            return _TRANSPORTS[transport](weights, rounds, directory, ours)
        finally:
            with contextlib.suppress(OSError):
                ours.send(None)
            process.join(5.0)
            process.kill()
            process.join()


def _through_directory(
    sender: SharedMemorySender | FileSender, weights: dict[str, Tensor], rounds: int, receiver: Connection
) -> dict[str, Any]:
    sender.announce(specs_of(weights))
    publish_s, receive_s = [], []
    for version in range(rounds + 1):  # the first version has to allocate memory pages
        started = time.perf_counter()
        sender.send(version, weights.items())
        publish_s.append(time.perf_counter() - started)
        receive_s.append(_ask(receiver, version))
    sender.close()
    return {"publish_s": statistics.median(publish_s[1:]), "receive_s": statistics.median(receive_s[1:])}


def _shared_memory(weights: dict[str, Tensor], rounds: int, directory: Path, receiver: Connection) -> dict[str, Any]:
    return _through_directory(SharedMemorySender(directory / "weights"), weights, rounds, receiver)


def _files(weights: dict[str, Tensor], rounds: int, directory: Path, receiver: Connection) -> dict[str, Any]:
    return _through_directory(FileSender(directory / "weights"), weights, rounds, receiver)


def _process_group(weights: dict[str, Tensor], rounds: int, directory: Path, receiver: Connection) -> dict[str, Any]:
    """Measure the process group and, in turns with it, a bare broadcast, each until the receiver has everything.

    `handshake_s`: time of publishing a single number, which is the cost of announcement and answer.
    """
    sender = ProcessGroupSender("127.0.0.1", timeout_s=_TIMEOUT_S)
    sender.connect(lambda invitation: _ask(receiver, invitation))
    bare = _bare_broadcast(sum(tensor.nbytes for tensor in weights.values()), receiver)

    def publish(sent: dict[str, Tensor]) -> float:
        started = time.perf_counter()
        sender.send(0, sent, lambda _, announcement: _ask(receiver, announcement))
        return time.perf_counter() - started

    def broadcast() -> float:
        receiver.send(_BROADCAST)
        seconds = bare()
        _answer(receiver)
        return seconds

    tiny = {"number": torch.zeros(())}
    times = [(publish(weights), broadcast(), publish(tiny)) for _ in range(rounds + 1)][1:]
    sender.close()
    dist.destroy_process_group()
    publish_s, broadcast_s, handshake_s = map(statistics.median, zip(*times, strict=True))
    return {
        "publish_s": publish_s,
        "receive_s": None,
        "handshake_s": handshake_s,
        "broadcast_s": broadcast_s,
        "over_broadcast": statistics.median(published / bare for published, bare, _ in times),
    }


@dataclass(frozen=True, slots=True)
class BareGroup:
    """Default process group of torch with world size 2, for broadcasts of one flat tensor."""

    port: int
    num_bytes: int

    def join(self, rank: int) -> Callable[[], float]:
        """Join the group; return a function that broadcasts and returns the seconds until both ranks are done."""
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{self.port}", rank=rank, world_size=2)
        flat = torch.ones(self.num_bytes, dtype=torch.uint8)

        def broadcast() -> float:
            dist.barrier()
            started = time.perf_counter()
            dist.broadcast(flat, 0)
            dist.barrier()
            return time.perf_counter() - started

        return broadcast


def _bare_broadcast(num_bytes: int, receiver: Connection) -> Callable[[], float]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    group = BareGroup(port, num_bytes)
    receiver.send(group)
    broadcast = group.join(rank=0)
    _answer(receiver)
    return broadcast


_TRANSPORTS: dict[str, Callable[[dict[str, Tensor], int, Path, Connection], dict[str, Any]]] = {
    "shared_memory": _shared_memory,
    "files": _files,
    "process_group": _process_group,
}


def _receiving(transport: str, directory: Path, sender: Connection) -> None:
    """Run the receiving process: receive as told, and answer with the duration (seconds)."""
    torch.set_num_threads(num_cores())
    path = directory / "weights"
    bare: Callable[[], float] | None = None
    receiver: Any = {"shared_memory": SharedMemoryReceiver, "files": FileReceiver}.get(transport, lambda _: None)(path)
    while (message := sender.recv()) is not None:
        started = time.perf_counter()
        match message:
            case Invitation():
                receiver = ProcessGroupReceiver(message)
            case Announcement():
                receiver.receive(message)
            case BareGroup():
                bare = message.join(rank=1)
            case str():
                assert bare is not None
                bare()
            case version:
                assert receiver.receive()[0] == version
        sender.send(time.perf_counter() - started)


def _ask(receiver: Connection, message: object) -> float:
    receiver.send(message)
    return _answer(receiver)


def _answer(receiver: Connection) -> float:
    if not receiver.poll(_TIMEOUT_S):
        raise WorkerError(f"the receiving process did not answer within {_TIMEOUT_S:g} s")
    try:
        return float(receiver.recv())
    except EOFError as error:
        raise WorkerError("the receiving process failed") from error


def _median_seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """Make a temporary directory, in shared memory if the system has it, as in a run."""
    shared_memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="midflight-bench-", dir=shared_memory if shared_memory.is_dir() else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def weights_table(rows: list[dict[str, Any]]) -> str:
    """Render one line per size and transport."""
    lines = [f"{'size':6}{'transport':16}{'seconds':>10}{'GB/s':>8}{'of memcpy':>12}{'of a broadcast':>16}"]
    for row in rows:
        broadcast = f"{row['over_broadcast']:.2f}x" if "over_broadcast" in row else "-"
        lines.append(
            f"{row['size']:6}{row['transport']:16}{row['publish_s']:>10.4f}{row['publish_gb_per_s']:>8.2f}"
            f"{100 * row['of_memcpy']:>10.1f} %{broadcast:>16}"
        )
    return "\n".join(lines)
