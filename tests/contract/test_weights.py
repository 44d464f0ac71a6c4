"""Contract of every weight transport, then the additional guarantees of shared memory and files.

Run as a program, this file is the sender: `test_weights.py hammer|die|hammer_files|die_in_files PATH [MOMENT]`.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import midflight
from midflight.concurrency import wake_up
from midflight.errors import WeightUpdateError
from midflight.protocols import WeightReceiver, WeightSender
from midflight.types import TensorSpec
from midflight.weights import files as weight_files
from midflight.weights.files import FileReceiver, FileSender
from midflight.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender

TIMEOUT_S = 60.0
HAMMERED = {"first": torch.zeros(64 * 1024), "middle": torch.zeros(3), "last": torch.zeros(64, 1024)}


def specs_of(weights: Mapping[str, Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights.items()
    ]


def weights_of(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "embedding": torch.randn(11, 3, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "head": torch.randn(5, 1, 2, generator=generator).half(),
        "scale": torch.randn((), generator=generator),
        "nothing": torch.randn(0, 4, generator=generator),
        "positions": torch.randint(-(2**62), 2**62, (9,), generator=generator),
    }


def assert_equal(received: tuple[int, Mapping[str, Tensor]], version: int, weights: Mapping[str, Tensor]) -> None:
    assert received[0] == version
    assert received[1].keys() == weights.keys()
    for name, tensor in weights.items():
        assert received[1][name].dtype == tensor.dtype
        assert torch.equal(received[1][name], tensor), name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def sender(path: Path) -> Iterator[SharedMemorySender]:
    with closing(SharedMemorySender(path)) as sender:
        yield sender


@pytest.fixture
def receiver(path: Path) -> Iterator[SharedMemoryReceiver]:
    with closing(SharedMemoryReceiver(path)) as receiver:
        yield receiver


@dataclass(frozen=True)
class Transport:
    sender: Callable[[Path], Any]
    receiver: Callable[[Path], Any]


@pytest.fixture(params=["shared_memory", "files"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return {
        "shared_memory": Transport(SharedMemorySender, SharedMemoryReceiver),
        "files": Transport(FileSender, FileReceiver),
    }[request.param]


@pytest.fixture
def any_sender(transport: Transport, path: Path) -> Iterator[WeightSender]:
    with closing(transport.sender(path)) as sender:
        yield sender


@pytest.fixture
def any_receiver(transport: Transport, path: Path) -> Iterator[WeightReceiver]:
    with closing(transport.receiver(path)) as receiver:
        yield receiver


def test_weights_of_every_dtype_arrive_exactly(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    for version in range(8):
        any_sender.send(version, weights_of(version).items())
        assert any_receiver.newest_version() == version
        assert_equal(any_receiver.receive(), version, weights_of(version))
        assert_equal(any_receiver.receive(), version, weights_of(version))


def test_only_the_newest_version_is_received(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    for version in range(10):
        any_sender.send(version, weights_of(version).items())
    assert_equal(any_receiver.receive(), 9, weights_of(9))
    any_sender.send(4, weights_of(4).items())
    assert any_receiver.newest_version() == 4, (
        "the newest version is the last one sent, even after a return to a checkpoint"
    )
    assert_equal(any_receiver.receive(), 4, weights_of(4))


def test_received_tensors_are_stable_until_the_next_receive(
    any_sender: WeightSender, any_receiver: WeightReceiver
) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    any_sender.send(0, weights_of(0).items())
    received = any_receiver.receive()
    for version in range(1, 8):
        any_sender.send(version, weights_of(version).items())
    assert_equal(received, 0, weights_of(0))


def test_strided_parameters_can_be_sent(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4).T)
    any_sender.announce(specs_of({"weight": weight}))
    for version in range(4):
        any_sender.send(version, {"weight": weight}.items())
    received = any_receiver.receive()
    assert_equal(received, 3, {"weight": weight.detach()})
    assert not received[1]["weight"].requires_grad


def test_a_receiver_may_start_before_the_sender(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    assert any_receiver.newest_version() is None
    with pytest.raises(WeightUpdateError, match="no weights have been sent"):
        any_receiver.receive()
    any_sender.announce(specs_of(weights_of(0)))
    assert any_receiver.newest_version() is None
    with pytest.raises(WeightUpdateError, match="no weights have been sent"):
        any_receiver.receive()
    any_sender.send(0, weights_of(0).items())
    assert any_receiver.newest_version() == 0


def test_all_receivers_get_the_same_weights(
    path: Path, transport: Transport, any_sender: WeightSender, any_receiver: WeightReceiver
) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    any_sender.send(5, weights_of(5).items())
    with closing(transport.receiver(path)) as late:
        assert_equal(late.receive(), 5, weights_of(5))
    assert_equal(any_receiver.receive(), 5, weights_of(5))


def test_wait_returns_after_timeout(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    assert not any_receiver.wait(newer_than=-1, timeout_s=0)
    assert not any_receiver.wait(newer_than=-1, timeout_s=0.01)
    any_sender.announce(specs_of(weights_of(0)))
    any_sender.send(3, weights_of(3).items())
    assert any_receiver.wait(newer_than=2, timeout_s=0)
    assert not any_receiver.wait(newer_than=3, timeout_s=0.01)


def test_a_version_wakes_a_waiting_receiver(
    any_sender: WeightSender, any_receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_up, "_RELOOK_S", 1e6)
    seen: list[int | None] = []
    turns = threading.Barrier(2)

    def follow() -> None:
        for version in range(50):
            assert any_receiver.wait(newer_than=version - 1, timeout_s=TIMEOUT_S)
            seen.append(any_receiver.newest_version())
            turns.wait(TIMEOUT_S)

    follower = threading.Thread(target=follow)
    follower.start()
    any_sender.announce(specs_of(weights_of(0)))
    for version in range(50):
        any_sender.send(version, weights_of(version).items())
        turns.wait(TIMEOUT_S)
    follower.join(TIMEOUT_S)
    assert seen == list(range(50))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, "the weights lack 'norm'"),
        ({"bias": torch.zeros(1)}, "the weights have 'bias', which was not announced"),
        ({"norm": torch.zeros(8).bfloat16()}, r"'norm' is bfloat16 \[8\], announced as bfloat16 \[7\]"),
        ({"norm": torch.zeros(7)}, r"'norm' is float32 \[7\], announced as bfloat16 \[7\]"),
        ({"embedding": torch.zeros(3, 11)}, r"'embedding' is float32 \[3, 11\], announced as float32 \[11, 3\]"),
    ],
)
def test_weights_unlike_the_announced_ones_are_refused(
    any_sender: WeightSender, any_receiver: WeightReceiver, change: dict[str, Tensor | None], message: str
) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    any_sender.send(1, weights_of(1).items())
    changed = {name: tensor for name, tensor in {**weights_of(2), **change}.items() if tensor is not None}
    with pytest.raises(WeightUpdateError, match=message):
        any_sender.send(2, changed.items())
    assert_equal(any_receiver.receive(), 1, weights_of(1))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([TensorSpec("a", (1,), "float32")] * 2, "tensor 'a' is announced twice"),
        ([TensorSpec("a", (1,), "complex64")], "tensor 'a' is complex64; only float32, bfloat16, float16, int64"),
        ([TensorSpec("a", (2**59,), "float32")], "cannot set aside .* MB: "),
    ],
)
def test_unsupported_tensors_are_refused(
    path: Path, sender: WeightSender, specs: Sequence[TensorSpec], message: str
) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        sender.announce(specs)
    assert not path.exists()
    with pytest.raises(WeightUpdateError, match="sent before they were announced"):
        sender.send(0, {}.items())


# --- restarts and replaced files --------------------------------------------------------------------------------


def test_a_restarted_sender_reuses_its_file(path: Path, receiver: WeightReceiver) -> None:
    for version in range(5):
        with closing(SharedMemorySender(path)) as sender:
            sender.announce(specs_of(weights_of(0)))
            if version:
                assert_equal(receiver.receive(), version - 1, weights_of(version - 1))
            sender.send(version, weights_of(version).items())
        assert_equal(receiver.receive(), version, weights_of(version))


def test_a_receiver_follows_a_new_layout(path: Path, sender: SharedMemorySender, receiver: WeightReceiver) -> None:
    sender.announce(specs_of(weights_of(0)))
    sender.send(7, weights_of(7).items())
    received = receiver.receive()
    other = {"only": torch.ones(3)}
    sender.announce(specs_of(other))
    assert receiver.newest_version() is None
    sender.send(1, other.items())
    assert_equal(receiver.receive(), 1, other)
    assert_equal(received, 7, weights_of(7))
    assert sorted(each.name for each in path.parent.iterdir()) == ["weights", "weights.sent"]


def test_a_receiver_follows_a_replaced_file(path: Path, sender: SharedMemorySender, receiver: WeightReceiver) -> None:
    sender.announce(specs_of(weights_of(0)))
    sender.send(7, weights_of(7).items())
    assert receiver.newest_version() == 7
    sender.unlink()
    assert list(path.parent.iterdir()) == []
    assert receiver.newest_version() is None
    with pytest.raises(WeightUpdateError, match="sent before they were announced"):
        sender.send(8, weights_of(8).items())
    sender.announce(specs_of(weights_of(0)))
    sender.send(2, weights_of(2).items())
    assert_equal(receiver.receive(), 2, weights_of(2))


@pytest.mark.parametrize("content", [b"", b"short", b"MIDFLTWT" + b"\xff" * 500, b"precious" * 1000])
def test_another_file_is_refused_and_kept(
    path: Path, sender: WeightSender, receiver: WeightReceiver, content: bytes
) -> None:
    path.write_bytes(content)
    with pytest.raises(WeightUpdateError, match="is not a file of shared weights"):
        sender.announce(specs_of(weights_of(0)))
    with pytest.raises(WeightUpdateError, match="is not a file of shared weights"):
        receiver.newest_version()
    assert path.read_bytes() == content


def test_a_truncated_file_is_refused(path: Path, sender: WeightSender, receiver: WeightReceiver) -> None:
    sender.announce(specs_of(weights_of(0)))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(WeightUpdateError, match="wrong size"):
        receiver.newest_version()


# --- torn reads -------------------------------------------------------------------------------------------------


def filled(version: int) -> dict[str, Tensor]:
    return {name: torch.tensor(float(version)).expand(tensor.shape) for name, tensor in HAMMERED.items()}


class Deadly(Tensor):
    """Tensor that calls `end` when copied."""

    end: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            args[1].end()
        return super().__torch_function__(func, types, args, kwargs)


def deadly(version: int, end: Callable[[], None]) -> dict[str, Tensor]:
    """Return weights whose last tensor calls `end` instead of being copied."""
    weights = filled(version)
    last = weights["last"].contiguous().as_subclass(Deadly)
    last.end = end
    return {**weights, "last": last}


def give_up() -> None:
    raise ZeroDivisionError


@contextmanager
def running(role: str, path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run this file as another process; kill the process at the end if it still runs."""
    environment = os.environ | {"PYTHONPATH": str(Path(midflight.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, __file__, role, str(path), *arguments], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_whole(received: tuple[int, Mapping[str, Tensor]]) -> int:
    version, weights = received
    for name, tensor in weights.items():
        assert (tensor.numpy() == version).all(), f"{name} of version {version} is torn"
    return version


@pytest.mark.slow
def test_concurrent_sends_never_tear_shared_memory(
    path: Path, receiver: SharedMemoryReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = SharedMemoryReceiver(path)
    copyto: Callable[[Any, Any], None] = np.copyto
    chance = random.Random(3)

    def interrupted_copy(to: Any, source: Any) -> None:
        """Copy in two halves; up to three sends in between, as on a busy machine. Three sends overtake the copy."""
        half = len(to) // 2
        copyto(to[:half], source[:half])
        newest = observer.newest_version()
        assert newest is not None
        assert observer.wait(newer_than=newest - 1 + chance.choice([0, 0, 0, 1, 2, 3]), timeout_s=TIMEOUT_S)
        copyto(to[half:], source[half:])

    monkeypatch.setattr(np, "copyto", interrupted_copy)
    with running("hammer", path):
        assert receiver.wait(newer_than=-1, timeout_s=TIMEOUT_S)
        versions = [assert_whole(receiver.receive()) for _ in range(2500)]
    monkeypatch.undo()
    observer.close()
    versions.append(assert_whole(receiver.receive()))
    assert versions == sorted(versions)


def test_an_overtaken_copy_starts_over(
    sender: WeightSender, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender goes once around its slots between the two halves of a copy, then stops."""
    sender.announce(specs_of(HAMMERED))
    versions = itertools.count()

    def send() -> None:
        version = next(versions)
        sender.send(version, filled(version).items())

    send()
    copyto: Callable[[Any, Any], None] = np.copyto
    overtake = itertools.chain([3, 4, 5], itertools.repeat(0))

    def slow_copy(to: Any, source: Any) -> None:
        half = len(to) // 2
        copyto(to[:half], source[:half])
        for _ in range(next(overtake)):
            send()
        copyto(to[half:], source[half:])

    monkeypatch.setattr(np, "copyto", slow_copy)
    assert assert_whole(receiver.receive()) == 12


def test_a_copy_of_a_slot_under_write_starts_over(
    sender: WeightSender, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the copy, the sender writes two versions and half of a third one into the slot under copy."""
    sender.announce(specs_of(HAMMERED))
    sender.send(0, filled(0).items())
    copyto: Callable[[Any, Any], None] = np.copyto

    def late_copy(to: Any, source: Any) -> None:
        monkeypatch.undo()
        sender.send(1, filled(1).items())
        sender.send(2, filled(2).items())
        with pytest.raises(ZeroDivisionError):
            sender.send(3, deadly(3, give_up).items())
        copyto(to, source)

    monkeypatch.setattr(np, "copyto", late_copy)
    assert assert_whole(receiver.receive()) == 2


def test_a_copy_that_is_not_overtaken_is_used(
    sender: WeightSender, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sends during a copy use other slots, so the receiver does not start over."""
    sender.announce(specs_of(HAMMERED))
    sender.send(0, filled(0).items())
    copyto: Callable[[Any, Any], None] = np.copyto

    def slow_copy(to: Any, source: Any) -> None:
        sender.send(1, filled(1).items())
        sender.send(2, filled(2).items())
        copyto(to, source)

    monkeypatch.setattr(np, "copyto", slow_copy)
    assert assert_whole(receiver.receive()) == 0


def test_a_failed_send_keeps_the_newest_version(sender: WeightSender, receiver: WeightReceiver) -> None:
    sender.announce(specs_of(HAMMERED))
    for version in range(6):  # fails once in every slot
        sender.send(version, filled(version).items())
        with pytest.raises(ZeroDivisionError):
            sender.send(version + 1, deadly(version + 1, give_up).items())
        assert assert_whole(receiver.receive()) == receiver.newest_version() == version


@pytest.mark.slow
def test_a_killed_sender_keeps_the_newest_version(path: Path, receiver: WeightReceiver) -> None:
    with running("die", path) as process:
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert assert_whole(receiver.receive()) == receiver.newest_version() == 7
    with closing(SharedMemorySender(path)) as sender:
        sender.announce(specs_of(HAMMERED))
        assert assert_whole(receiver.receive()) == 7
        sender.send(8, filled(8).items())
    assert assert_whole(receiver.receive()) == 8


def test_a_sender_without_room_uses_its_spare_path(
    path: Path, tmp_path: Path, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare, notes = tmp_path / "disk" / "weights", list[str]()
    spare.parent.mkdir()
    set_aside = os.posix_fallocate

    def refuse_in_memory(descriptor: int, offset: int, size: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent == path.parent:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        set_aside(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse_in_memory)
    for version in range(2):  # the second sender reuses the file of the first
        with closing(SharedMemorySender(path, spare, notes.append)) as sender:
            sender.announce(specs_of(HAMMERED))
            sender.send(version, filled(version).items())
        assert assert_whole(receiver.receive()) == version
    assert len(notes) == 1
    assert f"No space left on device; weights go through {spare}" in notes[0]
    sender.unlink()
    assert not spare.exists()
    assert receiver.newest_version() is None
    with closing(SharedMemorySender(path)) as sender, pytest.raises(WeightUpdateError, match="cannot set aside"):
        sender.announce(specs_of(HAMMERED))


# --- files ------------------------------------------------------------------------------------------------------


def test_the_last_two_versions_remain_as_safetensors(path: Path) -> None:
    with closing(FileSender(path)) as sender:
        sender.announce(specs_of(weights_of(0)))
        for version in range(5):
            sender.send(version, weights_of(version).items())
    names = sorted(each.name for each in path.iterdir())
    assert names == ["00000004.safetensors", "00000005.safetensors", "newest", "newest.sent"]
    with safe_open(path / names[1], framework="pt") as file:
        assert file.metadata() == {"weight_version": "4"}
        assert torch.equal(file.get_tensor("norm"), weights_of(4)["norm"])


def test_a_restarted_file_sender_continues_numbering(path: Path) -> None:
    with closing(FileReceiver(path)) as receiver:
        for version in (3, 4, 0):
            with closing(FileSender(path)) as sender:
                sender.announce(specs_of(weights_of(0)))
                sender.send(version, weights_of(version).items())
            assert_equal(receiver.receive(), version, weights_of(version))


def test_a_receiver_retries_when_a_file_vanishes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FileSender(path)) as sender, closing(FileReceiver(path)) as receiver:
        sender.announce(specs_of(HAMMERED))
        sender.send(0, filled(0).items())

        def late_load(file: Path) -> Any:
            monkeypatch.undo()
            sender.send(1, filled(1).items())
            sender.send(2, filled(2).items())
            return load_file(file)

        monkeypatch.setattr(weight_files, "load_file", late_load)
        assert assert_whole(receiver.receive()) == 2


def test_a_full_disk_keeps_the_newest_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FileSender(path)) as sender, closing(FileReceiver(path)) as receiver:
        sender.announce(specs_of(HAMMERED))
        sender.send(0, filled(0).items())

        def disk_full(_: Any, file: Path, metadata: Any) -> None:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(weight_files, "save_file", disk_full)
        with pytest.raises(WeightUpdateError, match=r"cannot be written to .*No space left"):
            sender.send(1, filled(1).items())
        monkeypatch.undo()
        assert assert_whole(receiver.receive()) == receiver.newest_version() == 0
        sender.send(2, filled(2).items())
        assert assert_whole(receiver.receive()) == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "four", "file": "x"}'])
def test_a_damaged_pointer_is_an_error(path: Path, content: str) -> None:
    path.mkdir()
    (path / "newest").write_text(content)
    with closing(FileReceiver(path)) as receiver, pytest.raises(WeightUpdateError, match="newest does not say which"):
        receiver.newest_version()


def test_a_damaged_weight_file_is_an_error(path: Path) -> None:
    with closing(FileSender(path)) as sender, closing(FileReceiver(path)) as receiver:
        sender.announce(specs_of(HAMMERED))
        sender.send(0, filled(0).items())
        file = path / "00000001.safetensors"
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(WeightUpdateError, match=r"00000001\.safetensors cannot be read"):
            receiver.receive()


@pytest.mark.slow
def test_concurrent_sends_never_tear_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver is often slower than two sends and finds its file deleted."""
    chance = random.Random(3)
    num_gone = 0
    with closing(FileReceiver(path)) as receiver, closing(FileReceiver(path)) as observer:

        def slow_load(file: Path) -> Any:
            nonlocal num_gone
            newest = observer.newest_version()
            assert newest is not None
            assert observer.wait(newer_than=newest - 1 + chance.choice([0, 0, 1, 2, 3]), timeout_s=TIMEOUT_S)
            num_gone += not file.exists()
            return load_file(file)

        monkeypatch.setattr(weight_files, "load_file", slow_load)
        with running("hammer_files", path):
            assert receiver.wait(newer_than=-1, timeout_s=TIMEOUT_S)
            versions = [assert_whole(receiver.receive()) for _ in range(50)]
        monkeypatch.undo()
        versions.append(assert_whole(receiver.receive()))
    assert versions == sorted(versions)
    assert num_gone > 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["half_written", "before_rename", "before_pointer"])
def test_a_killed_file_sender_keeps_the_newest_version(path: Path, moment: str) -> None:
    with closing(FileReceiver(path)) as receiver:
        with running("die_in_files", path, moment) as process:
            assert receiver.wait(newer_than=6, timeout_s=TIMEOUT_S)
            assert assert_whole(receiver.receive()) == 7
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert not receiver.wait(newer_than=7, timeout_s=0)
        assert assert_whole(receiver.receive()) == 7
        with closing(FileReceiver(path)) as late:
            assert assert_whole(late.receive()) == 7
        with closing(FileSender(path)) as sender:
            sender.announce(specs_of(HAMMERED))
            sender.send(8, filled(8).items())
        assert receiver.wait(newer_than=7, timeout_s=0)
        assert assert_whole(receiver.receive()) == 8
        assert len(list(path.glob("*.safetensors"))) == 2
        assert not list(path.glob("*.unfinished")), "unfinished files are overwritten"


def hammer(path: Path, kind: Callable[[Path], Any] = SharedMemorySender) -> None:
    sender = kind(path)
    sender.announce(specs_of(HAMMERED))
    test = os.getppid()
    for version in itertools.takewhile(lambda _: os.getppid() == test, itertools.count()):
        sender.send(version, filled(version).items())


def die(path: Path) -> None:
    sender = SharedMemorySender(path)
    sender.announce(specs_of(HAMMERED))
    sender.send(7, filled(7).items())
    sender.send(8, deadly(8, lambda: os.kill(os.getpid(), signal.SIGKILL)).items())


def die_in_files(path: Path, moment: str) -> None:
    sender = FileSender(path)
    sender.announce(specs_of(HAMMERED))
    sender.send(7, filled(7).items())

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half(_: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        die()

    match moment:
        case "half_written":
            vars(weight_files)["save_file"] = write_half
        case "before_rename":
            os.fsync = die
        case "before_pointer":
            Path.write_text = die  # type: ignore[assignment, method-assign]
    sender.send(8, filled(8).items())


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {
        "hammer": hammer,
        "die": die,
        "hammer_files": lambda path: hammer(path, FileSender),
        "die_in_files": die_in_files,
    }
    roles[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
