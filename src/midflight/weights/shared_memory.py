"""Weights between processes of one machine, through a mapped file.

    sender                                              receiver
    send     consumes: the trainer's tensors            receive   consumes: the newest slot
             waits for: nothing                                   waits for: nothing
                                                        wait      waits for: a newer version, PATH.sent
                                                                  unblocked by: send, relabel

Neither side can block the other or damage its data. A sender killed during a write leaves the newest slot unchanged,
and a receiver only reads the file. A receiver reads the slot itself, not a copy: it learns that two later sends have
overtaken it, and reads again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from midflight.concurrency.wake_up import WakeUp
from midflight.errors import WeightsReplacedError, WeightUpdateError
from midflight.protocols import IncomingWeights
from midflight.types import TensorSpec
from midflight.weights.slot_file import (
    BEGIN,
    CONTENT,
    END,
    NEWEST,
    NUM_SLOTS,
    Fence,
    SlotFile,
    SlotLayout,
    create,
    lay_out,
)
from midflight.weights.version_board import open_wake_up, wait_for_newer, wake_up_path


class SharedMemorySender:
    """The trainer's end. There is one sender per path; a restarted sender continues in the same file.

    Raises: WeightUpdateError if weights differ from the announcement, if memory has no room for the file, or if `path`
    is another kind of file.
    """

    def __init__(
        self, path: Path, spare: Path | None = None, note: Callable[[str], object] = lambda text: None
    ) -> None:
        """Store the paths. If there is no room at `path`, it becomes a link to `spare`, and `note` gets a line."""
        self._path, self._spare, self._note = path, spare, note
        self._file: SlotFile | None = None
        self._views: list[dict[str, Tensor]] = []
        self._sent: WakeUp | None = None
        self._fence = Fence()
        self.sent_bytes = 0

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        """Create the file for these tensors. A file that already fits is kept, with its newest weights."""
        layout = lay_out(specs)
        self.close()
        if self._path.exists():
            self._file = SlotFile(self._path, writable=True)
        if self._file is None or self._file.layout != layout:
            self.close()
            self._create(layout)
            self._file = SlotFile(self._path, writable=True)
        self._views = [layout.views(torch.from_numpy(slot)) for slot in self._file.slots]
        self._sent = open_wake_up(self._path)

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Make these weights the newest. Takes the time of one copy and never waits for a receiver."""
        file = self._announced_file()
        words = file.words
        slot = (words[NEWEST] & 3) % NUM_SLOTS  # the slot after the newest: the oldest weights
        stamp = 1 + max(words[BEGIN : BEGIN + NUM_SLOTS])
        words[BEGIN + slot] = stamp
        self._fence()
        words[CONTENT + slot] = version
        with torch.no_grad():
            for name, tensor in file.layout.checked(weights):
                self._views[slot][name].copy_(tensor)
                self.sent_bytes += tensor.nbytes
        self._fence()
        words[END + slot] = stamp
        self._publish(version, slot)

    def relabel(self, version: int) -> None:
        """Make this version the newest, with the tensors of the newest slot."""
        newest = self._announced_file().words[NEWEST]
        if not newest:
            raise WeightUpdateError(f"version {version} has no weights: none were sent before it")
        self._publish(version, (newest & 3) - 1)

    def wants_weights(self) -> bool:
        """Return False: receivers find the newest weights in the file."""
        return False

    def close(self) -> None:
        """Close the file. Receivers can still read its newest weights."""
        self._views = []
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._sent is not None:
            self._sent.close()
            self._sent = None

    def unlink(self) -> None:
        """Remove the file. Receivers see no weights until a sender announces again."""
        self.close()
        if self._path.is_symlink():
            self._path.readlink().unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        wake_up_path(self._path).unlink(missing_ok=True)

    def _announced_file(self) -> SlotFile:
        if self._file is None:
            raise WeightUpdateError("weights were sent before they were announced; call announce() first")
        return self._file

    def _publish(self, version: int, slot: int) -> None:
        assert self._file is not None
        assert self._sent is not None
        self._file.words[NEWEST] = version << 2 | slot + 1
        self._sent.notify()

    def _create(self, layout: SlotLayout) -> None:
        try:
            create(self._path, layout)
        except WeightUpdateError as error:
            cause = error.__cause__
            if self._spare is None or not isinstance(cause, OSError) or cause.errno != errno.ENOSPC:
                raise
            self._note(f"{error}; weights go through {self._spare} instead, which may be slower")
            create(self._spare, layout)
            self._path.unlink(missing_ok=True)
            self._path.symlink_to(self._spare)


class SharedMemoryReceiver:
    """An engine's end. Any number of receivers may read one path, even before its sender creates the file.

    Raises: WeightUpdateError if `path` is another kind of file, or no weights were sent.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: SlotFile | None = None
        self._views: list[dict[str, Tensor]] = []
        self._sent = open_wake_up(path)
        self._fence = Fence()

    def newest_version(self) -> int | None:
        """Version that `receive` would return now, or None if nothing was sent. Takes about a microsecond."""
        file = self._current_file()
        newest = file.words[NEWEST] if file else 0
        return newest >> 2 if newest else None

    def receive(self) -> IncomingWeights:
        """Return the newest weights as views of the sender's slot: nothing is copied.

        The sender overwrites this slot with the third version from now. The views stay valid memory in any case.
        """
        file = self._current_file()
        if file is None or not file.words[NEWEST]:
            raise WeightUpdateError(f"{self._path}: no weights have been sent yet")
        while True:
            newest = file.words[NEWEST]
            slot = (newest & 3) - 1
            stamp, content = file.words[END + slot], file.words[CONTENT + slot]
            self._fence()
            if file.words[NEWEST] == newest:  # so the sender wrote neither word meanwhile
                break
        views = _SlotViews(file, self._views[slot], slot, stamp)
        return IncomingWeights(newest >> 2, content, views, check=views.check)

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        """Wait for a version above `newer_than`; return True if there is one, False after the timeout."""
        return wait_for_newer(self.newest_version, lambda: self._sent, newer_than, timeout_s)

    def close(self) -> None:
        """Close the file. The tensors received last stay valid memory."""
        self._detach()
        self._sent.close()

    def _current_file(self) -> SlotFile | None:
        if self._file is not None and not self._file.is_removed():
            return self._file
        self._detach()
        try:
            self._file = SlotFile(self._path, writable=False)
        except FileNotFoundError:
            return None
        self._sent.close()
        self._sent = open_wake_up(self._path)  # it may have been replaced together with the file
        self._views = [self._file.layout.views(torch.from_numpy(slot)) for slot in self._file.slots]
        return self._file

    def _detach(self) -> None:
        self._views = []
        if self._file is not None:
            self._file.close()
            self._file = None


class _SlotViews:
    """The tensors of one slot, in order; iterating again begins again.

    Raises: WeightsReplacedError as soon as the sender has begun to overwrite the slot.
    """

    def __init__(self, file: SlotFile, views: dict[str, Tensor], slot: int, stamp: int) -> None:
        self._begin = file.begin_of(slot)
        self._views, self._stamp, self._fence = views, stamp, Fence()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._views.items():
            yield item
            self.check()

    def check(self) -> None:
        self._fence()
        if self._begin[0] != self._stamp:
            raise WeightsReplacedError("the trainer has overwritten the shared weights while they were read")


@dataclass(frozen=True, slots=True)
class SharedMemoryTransport:
    """Weight transport through a file in the shared memory of one machine; see SharedMemorySender."""

    shared: Path
    spare: Path
    note: Callable[[str], object]

    def sender(self) -> SharedMemorySender:
        return SharedMemorySender(self.shared, self.spare, self.note)

    def versions(self) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(self.shared)

    def receiver(self) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(self.shared)
