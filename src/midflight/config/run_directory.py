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


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def batches(self) -> Path:
        return self.path / "streams" / "batches.sqlite"

    @property
    def groups(self) -> Path:
        """Only if preprocessing is a process of its own."""
        return self.path / "streams" / "groups.sqlite"

    @property
    def identity(self) -> str:
        """No other run has the same, wherever it is."""
        return self.identity_file.read_text().strip()

    @property
    def identity_file(self) -> Path:
        return self.path / "streams" / "identity"

    @property
    def partials(self) -> Path:
        return self.path / "streams" / "partials.sqlite"

    @property
    def spare_weights(self) -> Path:
        """The file that weights are shared through if shared memory is too small."""
        return self.path / "weights.shared"

    @property
    def engines(self) -> Path:
        """Where servers that generate for this run say where they are."""
        return self.path / "engines"

    @property
    def rejected_batches(self) -> Path:
        return self.path / "logs" / "rejected"

    def log(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.log"

    def spans(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.spans.jsonl"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises: RunDirectoryError if another process is writing this run."""
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunDirectoryError(f"{self.path} is in use by another run") from error
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
