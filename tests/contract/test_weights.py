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
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import midflight
from midflight.concurrency import wake_up
from midflight.errors import WeightsReplacedError, WeightUpdateError
from midflight.protocols import PublishedVersions, WeightReceiver, WeightSender, WeightTransport
from midflight.types import TensorSpec
from midflight.weights import files as weight_files
from midflight.weights.files import FileReceiver, FileSender, FileTransport
from midflight.weights.null_sender import NullSender
from midflight.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedMemoryTransport
from midflight.weights.version_board import VersionBoard

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


def taken(receiver: WeightReceiver, copied: Callable[[Tensor], Tensor] = Tensor.clone) -> tuple[int, dict[str, Tensor]]:
    """Take the newest weights as an engine does: copy one tensor after another, again if newer ones replace them."""
    while True:
        incoming = receiver.receive()
        try:
            return incoming.version, {name: copied(tensor) for name, tensor in incoming.tensors}
        except WeightsReplacedError:
            continue


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


@pytest.fixture(params=["shared_memory", "files"])
def transport(request: pytest.FixtureRequest, path: Path, tmp_path: Path) -> WeightTransport:
    if request.param == "files":
        return FileTransport(tmp_path, path)
    return SharedMemoryTransport(path, tmp_path / "spare", print)


@pytest.fixture
def any_sender(transport: WeightTransport) -> Iterator[WeightSender]:
    with closing(transport.sender()) as sender:
        yield sender


@pytest.fixture
def any_receiver(transport: WeightTransport) -> Iterator[WeightReceiver]:
    receiver = transport.receiver()
    assert receiver
    with closing(receiver):
        yield receiver


def test_weights_of_every_dtype_arrive_exactly(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    for version in range(8):
        any_sender.send(version, weights_of(version).items())
        assert any_receiver.newest_version() == version
        assert_equal(taken(any_receiver), version, weights_of(version))
        assert_equal(taken(any_receiver), version, weights_of(version))


def test_only_the_newest_version_is_received(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    for version in range(10):
        any_sender.send(version, weights_of(version).items())
    assert_equal(taken(any_receiver), 9, weights_of(9))
    any_sender.send(4, weights_of(4).items())
    assert any_receiver.newest_version() == 4, (
        "the newest version is the last one sent, even after a return to a checkpoint"
    )
    assert_equal(taken(any_receiver), 4, weights_of(4))


def test_a_version_without_changes_keeps_its_content(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    for version in (3, 6, 9):
        any_sender.send(version, weights_of(version).items())
        incoming = any_receiver.receive()
        assert (incoming.version, incoming.content) == (version, version)
        for relabeled in (version + 1, version + 2):
            any_sender.relabel(relabeled)
            incoming = any_receiver.receive()
            assert (incoming.version, incoming.content, any_receiver.newest_version()) == (
                relabeled,
                version,
                relabeled,
            )
            assert_equal(taken(any_receiver), relabeled, weights_of(version))
    assert any_sender.sent_bytes == 3 * sum(tensor.nbytes for tensor in weights_of(0).values())
    assert not any_sender.wants_weights()


def test_a_version_without_weights_is_refused(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    with pytest.raises(WeightUpdateError, match="version 1 has no weights"):
        any_sender.relabel(1)
    assert any_receiver.newest_version() is None


def test_overtaken_tensors_are_refused_or_old(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    """Shared memory refuses the tensors at the third send, and files keep them."""
    any_sender.announce(specs_of(weights_of(0)))
    any_sender.send(0, weights_of(0).items())
    incoming, again = any_receiver.receive(), any_receiver.receive()
    tensors = iter(incoming.tensors)
    first = dict([next(tensors)])
    for version in (1, 2):
        any_sender.send(version, weights_of(version).items())
        incoming.check()
    any_sender.send(3, weights_of(3).items())
    if isinstance(any_sender, SharedMemorySender):
        with pytest.raises(WeightsReplacedError):
            next(tensors)
        with pytest.raises(WeightsReplacedError):
            list(again.tensors)
        with pytest.raises(WeightsReplacedError):
            incoming.check()
    else:
        incoming.check()
        assert_equal((0, first | dict(tensors)), 0, weights_of(0))
        assert_equal((0, dict(again.tensors)), 0, weights_of(0))
    assert_equal(taken(any_receiver), 3, weights_of(3))


def test_received_tensors_cannot_damage_the_weights(
    transport: WeightTransport, any_sender: WeightSender, any_receiver: WeightReceiver
) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    any_sender.send(0, weights_of(0).items())
    for _, tensor in any_receiver.receive().tensors:
        tensor.fill_(1)
    other = transport.receiver()
    assert other
    with closing(other):
        assert_equal(taken(other), 0, weights_of(0))


def test_shared_tensors_are_views(sender: WeightSender, receiver: WeightReceiver) -> None:
    sender.announce(specs_of(weights_of(0)))
    sender.send(0, weights_of(0).items())
    first, second = (dict(receiver.receive().tensors) for _ in range(2))
    assert {name: tensor.data_ptr() for name, tensor in first.items()} == {
        name: tensor.data_ptr() for name, tensor in second.items()
    }


def test_strided_parameters_can_be_sent(any_sender: WeightSender, any_receiver: WeightReceiver) -> None:
    weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4).T)
    any_sender.announce(specs_of({"weight": weight}))
    for version in range(4):
        any_sender.send(version, {"weight": weight}.items())
    received = taken(any_receiver)
    assert_equal(received, 3, {"weight": weight.detach()})
    assert not received[1]["weight"].requires_grad
    assert weight.requires_grad


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
    transport: WeightTransport, any_sender: WeightSender, any_receiver: WeightReceiver
) -> None:
    any_sender.announce(specs_of(weights_of(0)))
    any_sender.send(5, weights_of(5).items())
    late = transport.receiver()
    assert late
    with closing(late):
        assert_equal(taken(late), 5, weights_of(5))
    assert_equal(taken(any_receiver), 5, weights_of(5))


class Published:
    """A transport's sender and the rollout process' end, without tensors."""

    def __init__(self, sender: WeightSender | VersionBoard, versions: PublishedVersions) -> None:
        self.sender, self.versions = sender, versions

    def publish(self, version: int) -> None:
        """Publish a version; every second one has the weights of the version before."""
        if isinstance(self.sender, VersionBoard):
            self.sender.publish(version)
        elif version % 2:
            self.sender.relabel(version)
        else:
            self.sender.send(version, weights_of(version).items())


@pytest.fixture(params=["shared_memory", "files", "board"])
def published(request: pytest.FixtureRequest, path: Path, tmp_path: Path) -> Iterator[Published]:
    if request.param == "board":
        with closing(VersionBoard(path)) as writer, closing(VersionBoard(path)) as reader:
            yield Published(writer, reader)
        return
    transport = FileTransport(tmp_path, path) if request.param == "files" else SharedMemoryTransport(path, path, print)
    with closing(transport.sender()) as sender, closing(transport.versions()) as versions:
        sender.announce(specs_of(weights_of(0)))
        yield Published(sender, versions)


def test_wait_returns_after_timeout(published: Published) -> None:
    versions = published.versions
    assert versions.newest_version() is None
    assert not versions.wait(newer_than=-1, timeout_s=0)
    assert not versions.wait(newer_than=-1, timeout_s=0.01)
    for newest in (0, 8, 4):  # a trainer that returns to a checkpoint publishes a lower version
        published.publish(newest)
        assert versions.newest_version() == newest
        assert versions.wait(newer_than=newest - 1, timeout_s=0)
        assert not versions.wait(newer_than=newest, timeout_s=0.01)


def test_a_version_wakes_a_waiting_process(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_up, "_RELOOK_S", 1e6)
    seen: list[int | None] = []
    turns = threading.Barrier(2)

    def follow() -> None:
        for version in range(50):
            assert published.versions.wait(newer_than=version - 1, timeout_s=TIMEOUT_S)
            seen.append(published.versions.newest_version())
            turns.wait(TIMEOUT_S)

    follower = threading.Thread(target=follow)
    follower.start()
    for version in range(50):
        published.publish(version)
        turns.wait(TIMEOUT_S)
    follower.join(TIMEOUT_S)
    assert seen == list(range(50))


def test_a_board_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="cannot share the newest version: No such file"):
        VersionBoard(tmp_path / "nowhere" / "board")


def test_a_null_sender_takes_every_tensor() -> None:
    """Gathering a tensor is a collective, so a rank that sends nothing has to take part in it."""
    weights = iter(weights_of(0).items())
    sender = NullSender()
    sender.announce(specs_of(weights_of(0)))
    sender.send(0, weights)
    sender.relabel(1)
    assert next(weights, None) is None
    assert (sender.sent_bytes, sender.wants_weights()) == (0, False)


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
    assert_equal(taken(any_receiver), 1, weights_of(1))


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
                assert_equal(taken(receiver), version - 1, weights_of(version - 1))
            sender.send(version, weights_of(version).items())
        assert_equal(taken(receiver), version, weights_of(version))


def test_a_receiver_follows_a_new_layout(path: Path, sender: SharedMemorySender, receiver: WeightReceiver) -> None:
    sender.announce(specs_of(weights_of(0)))
    sender.send(7, weights_of(7).items())
    received = taken(receiver)
    other = {"only": torch.ones(3)}
    sender.announce(specs_of(other))
    assert receiver.newest_version() is None
    sender.send(1, other.items())
    assert_equal(taken(receiver), 1, other)
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
    assert_equal(taken(receiver), 2, weights_of(2))


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
def test_concurrent_sends_never_tear_shared_memory(path: Path, receiver: SharedMemoryReceiver) -> None:
    chance = random.Random(3)
    with running("hammer", path), closing(SharedMemoryReceiver(path)) as observer:

        def interrupted_copy(tensor: Tensor) -> Tensor:
            """Copy in two halves; up to three sends in between, as on a busy machine. Three overtake the copy."""
            newest = observer.newest_version()
            assert newest is not None
            target = newest - 1 + chance.choice([0, 0, 0, 0, 0, 1, 2, 3])
            return in_halves(tensor, lambda: observer.wait(newer_than=target, timeout_s=TIMEOUT_S))

        assert receiver.wait(newer_than=-1, timeout_s=TIMEOUT_S)
        versions = [assert_whole(taken(receiver, interrupted_copy)) for _ in range(800)]
    versions.append(assert_whole(taken(receiver)))
    assert versions == sorted(versions)


def in_halves(tensor: Tensor, meanwhile: Callable[[], object]) -> Tensor:
    """Copy one half, then `meanwhile`, then the other half."""
    copy, half = torch.empty_like(tensor), len(tensor) // 2
    copy[:half] = tensor[:half]
    meanwhile()
    copy[half:] = tensor[half:]
    return copy


def test_an_overtaken_copy_starts_over(sender: WeightSender, receiver: WeightReceiver) -> None:
    """The sender goes once around its slots between the two halves of a copy, then stops."""
    sender.announce(specs_of(HAMMERED))
    versions = itertools.count()
    overtake = itertools.chain([3, 4, 5], itertools.repeat(0))

    def send(num_versions: int = 1) -> None:
        for version in itertools.islice(versions, num_versions):
            sender.send(version, filled(version).items())

    send()
    received = taken(receiver, lambda tensor: in_halves(tensor, lambda: send(next(overtake))))
    assert assert_whole(received) == 12


def test_a_copy_of_a_slot_under_write_starts_over(sender: WeightSender, receiver: WeightReceiver) -> None:
    """Before the copy, the sender writes two versions and half of a third one into the slot under copy."""
    sender.announce(specs_of(HAMMERED))
    sender.send(0, filled(0).items())
    copies = itertools.count()

    def late_copy(tensor: Tensor) -> Tensor:
        if next(copies) == 0:
            sender.send(1, filled(1).items())
            sender.send(2, filled(2).items())
            with pytest.raises(ZeroDivisionError):
                sender.send(3, deadly(3, give_up).items())
        return tensor.clone()

    assert assert_whole(taken(receiver, late_copy)) == 2


def test_a_copy_that_is_not_overtaken_is_used(sender: WeightSender, receiver: WeightReceiver) -> None:
    """Two sends during a copy use other slots, so the receiver does not start over."""
    sender.announce(specs_of(HAMMERED))
    sender.send(0, filled(0).items())
    versions = iter([1, 2])

    def slow_copy(tensor: Tensor) -> Tensor:
        for version in versions:
            sender.send(version, filled(version).items())
        return tensor.clone()

    assert assert_whole(taken(receiver, slow_copy)) == 0


def test_a_failed_send_keeps_the_newest_version(sender: WeightSender, receiver: WeightReceiver) -> None:
    sender.announce(specs_of(HAMMERED))
    for version in range(6):  # fails once in every slot
        sender.send(version, filled(version).items())
        with pytest.raises(ZeroDivisionError):
            sender.send(version + 1, deadly(version + 1, give_up).items())
        assert assert_whole(taken(receiver)) == receiver.newest_version() == version


@pytest.mark.slow
def test_a_killed_sender_keeps_the_newest_version(path: Path, receiver: WeightReceiver) -> None:
    with running("die", path) as process:
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert assert_whole(taken(receiver)) == receiver.newest_version() == 7
    with closing(SharedMemorySender(path)) as sender:
        sender.announce(specs_of(HAMMERED))
        assert assert_whole(taken(receiver)) == 7
        sender.send(8, filled(8).items())
    assert assert_whole(taken(receiver)) == 8


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
        assert assert_whole(taken(receiver)) == version
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
            assert_equal(taken(receiver), version, weights_of(version))


def test_a_receiver_retries_when_a_file_vanishes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FileSender(path)) as sender, closing(FileReceiver(path)) as receiver:
        sender.announce(specs_of(HAMMERED))
        sender.send(0, filled(0).items())

        def late_open(file: Path, framework: str) -> Any:
            monkeypatch.undo()
            sender.send(1, filled(1).items())
            sender.send(2, filled(2).items())
            return safe_open(file, framework=framework)

        monkeypatch.setattr(weight_files, "safe_open", late_open)
        assert assert_whole(taken(receiver)) == 2


def test_a_file_that_is_removed_while_it_is_read_stays_readable(path: Path) -> None:
    with closing(FileSender(path)) as sender, closing(FileReceiver(path)) as receiver:
        sender.announce(specs_of(HAMMERED))
        sender.send(0, filled(0).items())
        incoming = receiver.receive()
        for version in (1, 2, 3):
            sender.send(version, filled(version).items())
        assert not (path / "00000001.safetensors").exists()
        assert assert_whole((incoming.version, dict(incoming.tensors))) == 0


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
        assert assert_whole(taken(receiver)) == receiver.newest_version() == 0
        sender.send(2, filled(2).items())
        assert assert_whole(taken(receiver)) == 2


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

        def slow_open(file: Path, framework: str) -> Any:
            nonlocal num_gone
            newest = observer.newest_version()
            assert newest is not None
            assert observer.wait(newer_than=newest - 1 + chance.choice([0, 0, 1, 2, 3]), timeout_s=TIMEOUT_S)
            num_gone += not file.exists()
            return safe_open(file, framework=framework)

        monkeypatch.setattr(weight_files, "safe_open", slow_open)
        with running("hammer_files", path):
            assert receiver.wait(newer_than=-1, timeout_s=TIMEOUT_S)
            versions = [assert_whole(taken(receiver)) for _ in range(50)]
        monkeypatch.undo()
        versions.append(assert_whole(taken(receiver)))
    assert versions == sorted(versions)
    assert num_gone > 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["half_written", "before_rename", "before_pointer"])
def test_a_killed_file_sender_keeps_the_newest_version(path: Path, moment: str) -> None:
    with closing(FileReceiver(path)) as receiver:
        with running("die_in_files", path, moment) as process:
            assert receiver.wait(newer_than=6, timeout_s=TIMEOUT_S)
            assert assert_whole(taken(receiver)) == 7
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert not receiver.wait(newer_than=7, timeout_s=0)
        assert assert_whole(taken(receiver)) == 7
        with closing(FileReceiver(path)) as late:
            assert assert_whole(taken(late)) == 7
        with closing(FileSender(path)) as sender:
            sender.announce(specs_of(HAMMERED))
            sender.send(8, filled(8).items())
        assert receiver.wait(newer_than=7, timeout_s=0)
        assert assert_whole(taken(receiver)) == 8
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
