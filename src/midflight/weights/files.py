"""Weights through a directory that sender and receivers share: for engines that join late. Tested on one machine.

    sender                                              receiver
    send     consumes: the trainer's tensors            receive   consumes: the newest file
             waits for: the disk                                  waits for: the disk
                                                        wait      waits for: another file, NEWEST.sent
                                                                  unblocked by: send

    newest                     JSON: which version is the newest, and in which file
    COUNT.safetensors          the tensors of one version, as any program can read them; the two newest stay

A file is written beside its place, synced and renamed, and only then named as the newest: what can be seen is whole. On
another machine a version is noticed when that machine looks again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from midflight.concurrency.wake_up import WakeUp
from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.slot_file import SlotLayout, lay_out

_NEWEST = "newest"
_NUM_KEPT = 2  # a receiver may be reading the one before the newest
_MAX_ATTEMPTS = 1000  # each fails only if two versions were sent meanwhile


class FileSender:
    """The trainer's end. There is one sender per directory; a restarted one goes on counting.

    Raises: WeightUpdateError if weights are not as announced, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._layout: SlotLayout | None = None
        self._sent: WakeUp | None = None

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        """Every tensor that will be sent; what the directory holds stays the newest."""
        self._layout = lay_out(specs)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sent = _open_wake_up(self._directory)

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Make these weights the newest; returns when they are on the disk."""
        if self._layout is None or self._sent is None:
            raise WeightUpdateError("weights were sent before they were announced")
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in self._layout.checked(weights)}
        counts = _counts(self._directory)
        name = f"{max(counts, default=0) + 1:08}.safetensors"
        try:
            with _placed(self._directory / name) as unfinished:
                save_file(contents, unfinished, metadata={"weight_version": str(version)})
            with _placed(self._directory / _NEWEST) as unfinished:
                unfinished.write_text(json.dumps({"version": version, "file": name}))
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"weights cannot be written to {self._directory}: {error}") from error
        self._sent.notify()
        for count in counts[: 1 - _NUM_KEPT]:
            (self._directory / f"{count:08}.safetensors").unlink(missing_ok=True)

    def close(self) -> None:
        """Receivers go on seeing the newest weights."""
        if self._sent is not None:
            self._sent.close()
            self._sent = None


class FileReceiver:
    """An engine's end; any number of them may look at one directory, before or after its sender makes it.

    Raises: WeightUpdateError if there is nothing to receive, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: tuple[int, int] | None = None  # inode and time of the last `newest` that was read
        self._newest: tuple[int, str] | None = None  # version, file

    def newest_version(self) -> int | None:
        """The version `receive` would return now, or None if nothing was sent; one `stat` if it is known already."""
        newest = self._look()
        return newest[0] if newest else None

    def receive(self) -> tuple[int, Mapping[str, Tensor]]:
        """The newest weights and their version, in tensors of their own."""
        for _ in range(_MAX_ATTEMPTS):
            newest = self._look()
            if newest is None:
                raise WeightUpdateError(f"{self._directory}: no weights have been sent")
            version, name = newest
            try:
                return version, load_file(self._directory / name)
            except FileNotFoundError:  # two versions came meanwhile
                self._seen = None
            except (OSError, SafetensorError) as error:
                raise WeightUpdateError(f"{self._directory / name} cannot be read: {error}") from error
        raise WeightUpdateError(f"{self._directory}: {name} is not there, and it should be the newest")

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        """Wait for a version above `newer_than`; whether there is one."""
        deadline_s = time.monotonic() + timeout_s
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_open_wake_up(self._directory)) as sent:
            while (version := self.newest_version()) is None or version <= newer_than:
                if not sent.wait(deadline_s):
                    return False
        return True

    def close(self) -> None:
        """The tensors received stay valid."""

    def _look(self) -> tuple[int, str] | None:
        path = self._directory / _NEWEST
        try:
            found = path.stat()
            if self._newest is None or self._seen != (found.st_ino, found.st_mtime_ns):
                values = json.loads(path.read_text())
                self._newest = int(values["version"]), str(values["file"])
                self._seen = found.st_ino, found.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightUpdateError(f"{path} does not say which weights are the newest: {error}") from error
        return self._newest


@dataclass(frozen=True, slots=True)
class FileTransport:
    """Through files in `directory`; default: in the run directory."""

    run_directory: Path
    directory: Path | None = None

    def sender(self) -> FileSender:
        return FileSender(self._place)

    def receiver(self) -> FileReceiver:
        return FileReceiver(self._place)

    @property
    def _place(self) -> Path:
        return self.directory or self.run_directory / "weights"


@contextlib.contextmanager
def _placed(path: Path) -> Iterator[Path]:
    """A path to write to; at the end that file is on the disk and at its place."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    yield unfinished
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    unfinished.rename(path)


def _counts(directory: Path) -> list[int]:
    """Of the files that are there, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*.safetensors") if path.stem.isdecimal())


def _open_wake_up(directory: Path) -> WakeUp:
    try:
        return WakeUp(directory / f"{_NEWEST}.sent")
    except OSError as error:
        raise WeightUpdateError(f"cannot wait in {directory}: {error.strerror}") from error
