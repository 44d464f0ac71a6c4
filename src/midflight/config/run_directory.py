"""The layout of a run directory, and its locks: no two processes write the same run."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from midflight.errors import RunDirectoryError

_STOP_TIMEOUT_S = 60.0  # a worker may be in a long optimizer step or writing a checkpoint
_POLL_S = 0.05
_WORKER_LOCK = ".worker.lock"


class _Entry:
    """Path of a file or directory in a run directory, as an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    config = _Entry("config.toml")
    metrics = _Entry("metrics.jsonl")
    evaluations = _Entry("evaluations.jsonl")
    summary = _Entry("summary.json")
    trace = _Entry("trace.json")
    checkpoints = _Entry("checkpoints")
    batches = _Entry("streams/batches.sqlite")
    groups = _Entry("streams/groups.sqlite")  # only if preprocessing has processes of its own
    partials = _Entry("streams/partials.sqlite")
    identity_file = _Entry("streams/identity")
    spare_weights = _Entry("weights.shared")  # replaces shared memory that is too small for the weights
    engines = _Entry("engines")  # where servers that generate for this run register their addresses
    rejected_batches = _Entry("logs/rejected")

    @property
    def identity(self) -> str:
        """Globally unique name of the run."""
        return self.identity_file.read_text().strip()

    def unscored(self, worker: int) -> Path:
        """Stream of the groups that a preprocessing process scores ahead of their batches."""
        return self.path / "streams" / f"unscored-{worker}.sqlite"

    def scores(self, worker: int) -> Path:
        return self.path / "streams" / f"scores-{worker}.sqlite"

    def log(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.log"

    def spans(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.spans.jsonl"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the run. Raises: RunDirectoryError if another process holds it."""
        with (self.path / ".lock").open("w") as lock:
            if not _try_lock(lock):
                raise RunDirectoryError(f"{self.path} is in use by another process")
            yield

    @contextlib.contextmanager
    def worker_locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a worker: at most one worker of each name lives, whichever supervisor started it.

        Raises: RunDirectoryError if another worker of this name lives.
        """
        with (self.path / f".{name}{_WORKER_LOCK}").open("w") as lock:
            if not _try_lock(lock):
                raise RunDirectoryError(f"{self.path} is in use: a {name} process is already running")
            yield

    def wait_for_workers(self, note: Callable[[str], object]) -> None:
        """Wait until no worker of an earlier supervisor is left; workers may outlive it by a moment.

        Raises: RunDirectoryError if a worker does not stop in time.
        """
        deadline_s: float | None = None
        for path in self.path.glob(f".*{_WORKER_LOCK}"):
            with path.open("w") as lock:
                while not _try_lock(lock):
                    if deadline_s is None:
                        note("waiting for the processes of an earlier run in this directory to stop")
                        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
                    if time.monotonic() >= deadline_s:
                        raise RunDirectoryError(f"{self.path} is in use: processes of an earlier run do not stop")
                    time.sleep(_POLL_S)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
