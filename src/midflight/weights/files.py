"""Weights through a directory that sender and receivers share: for engines that join late. Tested on one machine.

    sender                                              receiver
    send     consumes: the trainer's tensors            receive   consumes: the newest file
             waits for: the disk                                  waits for: the disk
                                                        wait      waits for: another version, newest.sent
                                                                  unblocked by: send, relabel

    newest                     JSON: the newest version, the name of its file, and the version that the file was sent as
    COUNT.safetensors          the tensors of one version, readable by any program; the two newest files stay

A file is written under a temporary name, synced and renamed. Only then does `newest` name it, so readers never see an
incomplete file. A receiver on another machine notices a new version when it next reads `newest`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from midflight.concurrency.wake_up import WakeUp
from midflight.errors import WeightUpdateError
from midflight.protocols import IncomingWeights
from midflight.types import TensorSpec
from midflight.weights.slot_file import SlotLayout, lay_out
from midflight.weights.version_board import open_wake_up, wait_for_newer

_NEWEST = "newest"
_NUM_KEPT = 2  # a receiver may be reading the file before the newest
_MAX_ATTEMPTS = 1000  # an attempt fails only if two versions are sent during it


@dataclass(frozen=True, slots=True)
class _Newest:
    """Contents of the file `newest`."""

    version: int
    file: str  # name
    content: int  # version that the file was sent as


class FileSender:
    """The trainer's end. There is one sender per directory; a restarted sender continues the file numbers.

    Raises: WeightUpdateError if weights differ from the announcement, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._layout: SlotLayout | None = None
        self._sent: WakeUp | None = None
        self._file: _Newest | None = None  # the file that this sender wrote last
        self.sent_bytes = 0

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        """Set the tensors that each `send` must bring. Weights already in the directory stay the newest."""
        self._layout = lay_out(specs)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sent = open_wake_up(self._directory / _NEWEST)

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Make these weights the newest; return when they are on disk."""
        if self._layout is None:
            raise WeightUpdateError("weights were sent before they were announced; call announce() first")
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in self._layout.checked(weights)}
        counts = _file_numbers(self._directory)
        name = f"{max(counts, default=0) + 1:08}.safetensors"
        try:
            with _written_atomically(self._directory / name) as unfinished:
                save_file(contents, unfinished, metadata={"weight_version": str(version)})
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"weights cannot be written to {self._directory}: {error}") from error
        self._publish(_Newest(version, name, version))
        self.sent_bytes += sum(tensor.nbytes for tensor in contents.values())
        for count in counts[: 1 - _NUM_KEPT]:
            (self._directory / f"{count:08}.safetensors").unlink(missing_ok=True)

    def relabel(self, version: int) -> None:
        """Make this version the newest, with the file that was written last."""
        if self._file is None:
            raise WeightUpdateError(f"version {version} has no weights: none were sent before it")
        self._publish(replace(self._file, version=version))

    def wants_weights(self) -> bool:
        """Return False: receivers find the newest weights in the directory."""
        return False

    def _publish(self, newest: _Newest) -> None:
        assert self._sent is not None, "announced"
        try:
            with _written_atomically(self._directory / _NEWEST) as unfinished:
                unfinished.write_text(json.dumps(asdict(newest)))
        except OSError as error:
            raise WeightUpdateError(f"weights cannot be written to {self._directory}: {error}") from error
        self._file = newest
        self._sent.notify()

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
        self._newest: _Newest | None = None

    def newest_version(self) -> int | None:
        """Version that `receive` would return now, or None if nothing was sent. Costs one `stat` if unchanged."""
        newest = self._read_newest()
        return newest.version if newest else None

    def receive(self) -> IncomingWeights:
        """Return the newest weights. Each tensor is read from its file when it is taken."""
        for _ in range(_MAX_ATTEMPTS):
            newest = self._read_newest()
            if newest is None:
                raise WeightUpdateError(f"{self._directory}: no weights have been sent yet")
            path = self._directory / newest.file
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError:  # two newer versions were sent, and the sender removed this file
                self._seen = None
            except (OSError, SafetensorError) as error:
                raise WeightUpdateError(f"{path} cannot be read: {error}") from error
            else:
                return IncomingWeights(newest.version, newest.content, _tensors(path, file))
        raise WeightUpdateError(f"{path} is missing, although {_NEWEST!r} names it")

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        """Wait for a version above `newer_than`; return True if there is one, False after the timeout."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(open_wake_up(self._directory / _NEWEST)) as sent:
            return wait_for_newer(self.newest_version, lambda: sent, newer_than, timeout_s)

    def close(self) -> None:
        """Do nothing: no resource is held, and received tensors stay valid."""

    def _read_newest(self) -> _Newest | None:
        path = self._directory / _NEWEST
        try:
            status = path.stat()
            if self._newest is None or self._seen != (status.st_ino, status.st_mtime_ns):
                values = json.loads(path.read_text())
                version = int(values["version"])
                # A directory of an earlier release has no `content`.
                self._newest = _Newest(version, str(values["file"]), int(values.get("content", version)))
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

    def versions(self) -> FileReceiver:
        return FileReceiver(self._weights_directory)

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


def _tensors(path: Path, file: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an open safetensors file, in the order of the file."""
    for name in file.offset_keys():
        try:
            yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise WeightUpdateError(f"{path}: tensor {name!r} cannot be read: {error}") from error
