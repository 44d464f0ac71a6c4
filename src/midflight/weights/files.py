"""Weights through a directory that sender and receivers share: for engines that join late. Tested on one machine.

    sender                                              receiver
    send     consumes: the trainer's tensors            receive   consumes: the newest file
             waits for: the disk                                  waits for: the disk
                                                        wait      waits for: another file, NEWEST.sent
                                                                  unblocked by: send

    newest                     JSON: the newest version and the name of its file
    COUNT.safetensors          the tensors of one version, readable by any program; the two newest files stay

A file is written under a temporary name, synced and renamed. Only then does `newest` name it, so readers never see an
incomplete file. A receiver on another machine notices a new version when it next reads `newest`.
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
_NUM_KEPT = 2  # a receiver may be reading the file before the newest
_MAX_ATTEMPTS = 1000  # an attempt fails only if two versions are sent during it


class FileSender:
    """The trainer's end. There is one sender per directory; a restarted sender continues the file numbers.

    Raises: WeightUpdateError if weights differ from the announcement, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._layout: SlotLayout | None = None
        self._sent: WakeUp | None = None

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        """Set the tensors that each `send` must bring. Weights already in the directory stay the newest."""
        self._layout = lay_out(specs)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sent = _open_wake_up(self._directory)

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Make these weights the newest; return when they are on disk."""
        if self._layout is None or self._sent is None:
            raise WeightUpdateError("weights were sent before they were announced; call announce() first")
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in self._layout.checked(weights)}
        counts = _file_numbers(self._directory)
        name = f"{max(counts, default=0) + 1:08}.safetensors"
        try:
            with _written_atomically(self._directory / name) as unfinished:
                save_file(contents, unfinished, metadata={"weight_version": str(version)})
            with _written_atomically(self._directory / _NEWEST) as unfinished:
                unfinished.write_text(json.dumps({"version": version, "file": name}))
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"weights cannot be written to {self._directory}: {error}") from error
        self._sent.notify()
        for count in counts[: 1 - _NUM_KEPT]:
            (self._directory / f"{count:08}.safetensors").unlink(missing_ok=True)

    def close(self) -> None:
        """Release the sender's resources. Receivers can still read the newest weights."""
        if self._sent is not None:
            self._sent.close()
            self._sent = None


class FileReceiver:
    """An engine's end. Any number of receivers may read one directory, even before its sender creates it.

    Raises: WeightUpdateError if no weights were sent, or they cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: tuple[int, int] | None = None  # inode and modification time (ns) of the last `newest` read
        self._newest: tuple[int, str] | None = None  # version, file

    def newest_version(self) -> int | None:
        """Version that `receive` would return now, or None if nothing was sent. Costs one `stat` if unchanged."""
        newest = self._read_newest()
        return newest[0] if newest else None

    def receive(self) -> tuple[int, Mapping[str, Tensor]]:
        """Return the newest version and its weights, in newly allocated tensors."""
        for _ in range(_MAX_ATTEMPTS):
            newest = self._read_newest()
            if newest is None:
                raise WeightUpdateError(f"{self._directory}: no weights have been sent yet")
            version, name = newest
            try:
                return version, load_file(self._directory / name)
            except FileNotFoundError:  # two newer versions were sent, and the sender removed this file
                self._seen = None
            except (OSError, SafetensorError) as error:
                raise WeightUpdateError(f"{self._directory / name} cannot be read: {error}") from error
        raise WeightUpdateError(f"{self._directory}: {name} is missing, although {_NEWEST!r} names it")

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        """Wait for a version above `newer_than`; return True if there is one, False after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_open_wake_up(self._directory)) as sent:
            while (version := self.newest_version()) is None or version <= newer_than:
                if not sent.wait(deadline_s):
                    return False
        return True

    def close(self) -> None:
        """Do nothing: no resource is held, and received tensors stay valid."""

    def _read_newest(self) -> tuple[int, str] | None:
        path = self._directory / _NEWEST
        try:
            status = path.stat()
            if self._newest is None or self._seen != (status.st_ino, status.st_mtime_ns):
                values = json.loads(path.read_text())
                self._newest = int(values["version"]), str(values["file"])
                self._seen = status.st_ino, status.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightUpdateError(f"{path} does not say which weights are the newest: {error}") from error
        return self._newest


@dataclass(frozen=True, slots=True)
class FileTransport:
    """Weight transport through files in `directory` (default: `weights` in the run directory)."""

    run_directory: Path
    directory: Path | None = None

    def sender(self) -> FileSender:
        return FileSender(self._weights_directory)

    def receiver(self) -> FileReceiver:
        return FileReceiver(self._weights_directory)

    @property
    def _weights_directory(self) -> Path:
        return self.directory or self.run_directory / "weights"


@contextlib.contextmanager
def _written_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on exit, sync that file and rename it to `path`."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    yield unfinished
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    unfinished.rename(path)


def _file_numbers(directory: Path) -> list[int]:
    """Numbers of the weight files in the directory, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*.safetensors") if path.stem.isdecimal())


def _open_wake_up(directory: Path) -> WakeUp:
    try:
        return WakeUp(directory / f"{_NEWEST}.sent")
    except OSError as error:
        raise WeightUpdateError(f"cannot open the wake-up FIFO in {directory}: {error.strerror}") from error
