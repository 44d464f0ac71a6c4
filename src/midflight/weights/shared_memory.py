"""Weights between processes of one machine, through a mapped file.

    sender                                              receiver
    send     consumes: the trainer's tensors            receive   consumes: the newest slot
             waits for: nothing                                   waits for: nothing; copies again if two sends lap it
                                                        wait      waits for: a newer version, PATH.sent
                                                                  unblocked by: send

Neither side can block the other or damage its data. A sender killed during a write leaves the newest slot unchanged,
and a receiver only reads the file.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from midflight.concurrency.wake_up import WakeUp
from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.slot_file import (
    BEGIN,
    END,
    NEWEST,
    NUM_SLOTS,
    VERSION,
    Fence,
    SlotFile,
    SlotLayout,
    create,
    lay_out,
)

_MAX_LAPS = 1000  # a lap takes two complete sends during one copy; this many mean that the file is broken


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
        self._sent = _open_wake_up(self._path)

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Make these weights the newest. Takes the time of one copy and never waits for a receiver."""
        if self._file is None or self._sent is None:
            raise WeightUpdateError("weights were sent before they were announced; call announce() first")
        words = self._file.words
        slot = (words[NEWEST] & 3) % NUM_SLOTS  # the slot after the newest: the oldest weights
        stamp = 1 + max(words[BEGIN : BEGIN + NUM_SLOTS])
        words[BEGIN + slot] = stamp
        self._fence()
        words[VERSION + slot] = version
        with torch.no_grad():
            for name, tensor in self._file.layout.checked(weights):
                self._views[slot][name].copy_(tensor)
        self._fence()
        words[END + slot] = stamp
        words[NEWEST] = version << 2 | slot + 1
        self._sent.notify()

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
        _wake_up_path(self._path).unlink(missing_ok=True)

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
        self._buffer = np.empty(0, np.uint8)
        self._tensors: dict[str, Tensor] = {}
        self._sent = _open_wake_up(path)
        self._fence = Fence()

    def newest_version(self) -> int | None:
        """Version that `receive` would return now, or None if nothing was sent. Takes about a microsecond."""
        file = self._current_file()
        newest = file.words[NEWEST] if file else 0
        return newest >> 2 if newest else None

    def receive(self) -> tuple[int, Mapping[str, Tensor]]:
        """Return the newest version and its weights, copied into tensors that the next `receive` overwrites."""
        file = self._current_file()
        if file is None or not file.words[NEWEST]:
            raise WeightUpdateError(f"{self._path}: no weights have been sent yet")
        for _ in range(_MAX_LAPS):
            version = self._copy_newest(file)
            if version is not None:
                return version, self._tensors
        raise WeightUpdateError(f"{self._path}: no complete version could be copied in {_MAX_LAPS} attempts")

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        """Wait for a version above `newer_than`; return True if there is one, False after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while (version := self.newest_version()) is None or version <= newer_than:
            if not self._sent.wait(deadline_s):
                return False
        return True

    def close(self) -> None:
        """Close the file. The tensors received last stay valid."""
        self._detach()
        self._sent.close()

    def _copy_newest(self, file: SlotFile) -> int | None:
        """Copy the newest slot to the buffer; return its version, or None if the sender wrote to the slot meanwhile."""
        slot = (file.words[NEWEST] & 3) - 1
        stamp = file.words[END + slot]
        self._fence()
        version = file.words[VERSION + slot]
        np.copyto(self._buffer, file.slots[slot])
        self._fence()
        return version if file.words[BEGIN + slot] == stamp else None

    def _current_file(self) -> SlotFile | None:
        if self._file is not None and not self._file.is_removed():
            return self._file
        self._detach()
        try:
            self._file = SlotFile(self._path, writable=False)
        except FileNotFoundError:
            return None
        self._sent.close()
        self._sent = _open_wake_up(self._path)  # it may have been replaced together with the file
        slot = torch.empty(self._file.layout.slot_bytes, dtype=torch.uint8)
        self._buffer = slot.numpy()
        self._tensors = self._file.layout.views(slot)
        return self._file

    def _detach(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class SharedMemoryTransport:
    """Weight transport through a file in the shared memory of one machine; see SharedMemorySender."""

    shared: Path
    spare: Path
    note: Callable[[str], object]

    def sender(self) -> SharedMemorySender:
        return SharedMemorySender(self.shared, self.spare, self.note)

    def receiver(self) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(self.shared)


def _wake_up_path(path: Path) -> Path:
    return path.with_name(path.name + ".sent")


def _open_wake_up(path: Path) -> WakeUp:
    try:
        return WakeUp(_wake_up_path(path))
    except OSError as error:
        raise WeightUpdateError(f"cannot open the wake-up FIFO {_wake_up_path(path)}: {error.strerror}") from error
