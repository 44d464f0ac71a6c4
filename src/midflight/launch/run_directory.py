"""A run directory: everything of one run, and a lock so that no two processes write it."""

from __future__ import annotations

import contextlib
import fcntl
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from midflight.config import Recipe, dump_toml, load_recipe
from midflight.errors import RecipeError, RunDirectoryError

_STOP_TIMEOUT_S = 60.0  # a worker may be at a long optimizer step, or at a checkpoint
_POLL_S = 0.05
_WORKER_LOCK = ".worker.lock"
# What may differ when a run goes on; the rest decides which problems and batches there are.
_RESUMABLE = {"trainer", "supervisor", "engine", "eval", "preprocess.threads"}
_FIXED = {"trainer.lora_rank", "trainer.lora_alpha", "trainer.lora_targets"}  # what checkpoints hold depends on them


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
        return self._identity.read_text().strip()

    @property
    def _identity(self) -> Path:
        return self.path / "streams" / "identity"

    @property
    def partials(self) -> Path:
        return self.path / "streams" / "partials.sqlite"

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


def create_run(recipe: Recipe) -> RunDirectory:
    """A new run directory with the resolved recipe in it.

    Raises: RunDirectoryError if the directory already holds something.
    """
    path = recipe.run.directory or Path("runs") / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = path.resolve()
    run = RunDirectory(path)
    if run.config.exists():
        raise RunDirectoryError(
            f"{path} already holds a run; `midflight train {path} --resume` goes on with it, another run.directory"
            " starts a new one"
        )
    create_directory(path)
    try:
        for directory in (run.checkpoints, run.batches.parent, run.path / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        run._identity.write_text(f"{uuid.uuid4().hex}\n")
        run.config.write_text(dump_toml(recipe.model_copy(update={"run": _at(recipe, path)})))
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {path}: {error.strerror}") from error
    return run


def create_directory(path: Path) -> None:
    """Create a directory, unless it is there and empty.

    Raises: RunDirectoryError if something is there, or it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        empty = not any(path.iterdir())
    except FileExistsError:
        empty = False
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {path}: {error.strerror}") from error
    if not empty:
        raise RunDirectoryError(f"{path} exists and is not an empty directory")


def open_run(path: Path, overrides: list[str]) -> tuple[RunDirectory, Recipe]:
    """An existing run and its recipe.

    Raises: RunDirectoryError if it is no run; RecipeError for an override that would make it a different run.
    """
    run = RunDirectory(path.resolve())
    if not run.config.is_file():
        raise RunDirectoryError(f"{path} holds no run: there is no {run.config.name} in it")
    for override in overrides:
        key = override.partition("=")[0].strip()
        section = key.partition(".")[0]
        if key in _FIXED:
            raise RecipeError(f"override {override}: a run goes on with the {key} it began with")
        if not {section, key} & _RESUMABLE:
            allowed = ", ".join(sorted(_RESUMABLE))
            raise RecipeError(
                f"override {override}: a run goes on with the {section} it began with; only {allowed} may change"
            )
    return run, load_recipe(run.config, overrides)


def check_output(path: Path | None) -> None:
    """Whether a file can be written there, before the work that it is of. Raises: RunDirectoryError."""
    if path is not None and not path.parent.is_dir():
        raise RunDirectoryError(f"cannot write {path}: there is no directory {path.parent}")
    if path is not None and path.is_dir():
        raise RunDirectoryError(f"cannot write {path}: it is a directory")


def write_whole(path: Path, text: str) -> None:
    """Replace the file at once, so that a full disk leaves the old one.

    Raises: RunDirectoryError if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}") from error


def _at(recipe: Recipe, path: Path) -> object:
    return recipe.run.model_copy(update={"directory": path})
