"""The layout of a run directory, and its locks: no two processes write one run."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from midflight.errors import RunDirectoryError

_STOP_TIMEOUT_S = 60.0  # a worker may be at a long optimizer step, or at a checkpoint
_POLL_S = 0.05
_WORKER_LOCK = ".worker.lock"


class _Below:
    """The path of that name in a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    config = _Below("config.toml")
    metrics = _Below("metrics.jsonl")
    summary = _Below("summary.json")
    trace = _Below("trace.json")
    checkpoints = _Below("checkpoints")
    batches = _Below("streams/batches.sqlite")
    groups = _Below("streams/groups.sqlite")  # only if preprocessing is a process of its own
    partials = _Below("streams/partials.sqlite")
    identity_file = _Below("streams/identity")
    spare_weights = _Below("weights.shared")  # weights are shared through it if shared memory is too small
    engines = _Below("engines")  # where servers that generate for this run say where they are
    rejected_batches = _Below("logs/rejected")

    @property
    def identity(self) -> str:
        """No other run has the same, wherever it is."""
        return self.identity_file.read_text().strip()

    def log(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.log"

    def spans(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.spans.jsonl"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises: RunDirectoryError if another process is writing this run."""
        with (self.path / ".lock").open("w") as lock:
            if not _try_lock(lock):
                raise RunDirectoryError(f"{self.path} is in use by another run")
            yield

    @contextlib.contextmanager
    def worker_locked(self, name: str) -> Iterator[None]:
        """What a worker holds while it lives: there is one of each name, whoever started it.

        Raises: RunDirectoryError if there is another one.
        """
        with (self.path / f".{name}{_WORKER_LOCK}").open("w") as lock:
            if not _try_lock(lock):
                raise RunDirectoryError(f"{self.path} is in use: it has a {name} process already")
            yield

    def wait_for_workers(self, say: Callable[[str], object]) -> None:
        """Until no worker of an earlier supervisor is left, which it may outlive by a moment.

        Raises: RunDirectoryError if one does not end.
        """
        deadline_s: float | None = None
        for path in self.path.glob(f".*{_WORKER_LOCK}"):
            with path.open("w") as lock:
                while not _try_lock(lock):
                    if deadline_s is None:
                        say("waiting for the processes of an earlier run in this directory to stop")
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
