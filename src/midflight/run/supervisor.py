"""Supervision of a run's processes: start them together, read their messages, restart them when they die or hang.

waits for      a message or the end of a process
unblocked by   either; heartbeats are checked in every `watch`

A process has a role, such as `rollout`. The ranks of the trainer, `trainer`, `trainer-1`, ..., have one role: they are
started and killed together. Processes are forks of a fork server. They outlive the server, which is restarted when it
is needed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from ctypes import c_uint64
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import WorkerError
from midflight.run.worker_process import WorkerBody, WorkerContext, run_worker

_STOP_TIMEOUT_S = 60.0
_EXIT_CODE_TIMEOUT_S = 5.0  # the fork server, which reports exit codes, may be stopped
_UNKNOWN_EXIT_CODE = 255  # exit code of a process that outlived its fork server
_MAX_BACKOFF_S = 60.0
# Longest time that counts as silence per check: the supervisor itself may have been suspended, as by Ctrl-Z.
_MAX_TICK_S = 1.0


def warm_up() -> None:
    """Start the fork server unless it is running. It imports the modules of the workers in the background.

    The trainer builds its model with the code of transformers, which the supervisor's process never imports.
    """
    # torch counts devices without CUDA then: a fork server that has called CUDA could not fork a process that uses it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.set_forkserver_preload(["midflight.run.workers", "transformers.modeling_utils"])
    multiprocessing.forkserver.ensure_running()


class _Worker:
    """One process, from its start to its end."""

    def __init__(self, name: str, body: WorkerBody, context: WorkerContext, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.ready = self.done = self._has_begun = False
        self.failure: str | None = None  # the text of its "crashed" message
        self.silent_s = 0.0
        self._heartbeat, self._last_beat = context.heartbeat, 0
        self.process = multiprocessing.get_context("forkserver").Process(
            target=run_worker, args=(body, name, context), name=name
        )
        try:
            self.process.start()
            self.sentinel = self.process.sentinel  # ready at the process's end, but also at the fork server's end
            if sys.platform == "linux":
                assert self.process.pid is not None
                self.sentinel = os.pidfd_open(self.process.pid)
                weakref.finalize(self, os.close, self.sentinel)
        except (EOFError, OSError):  # if the process was started all the same, it ends when `connection` closes
            connection.close()
            raise
        finally:
            context.supervisor.close()

    def begin(self) -> None:
        """Let the process begin, unless it has begun."""
        if not self._has_begun:
            self._has_begun = True
            with contextlib.suppress(OSError):  # the process has just died
                self.connection.send(("go",))

    def tick(self, seconds: float) -> None:
        """Count `seconds` as silence unless the heartbeat has advanced since the last call."""
        beat = self._heartbeat.value
        self.silent_s = self.silent_s + seconds if beat == self._last_beat else 0.0
        self._last_beat = beat

    def describe_end(self) -> str:
        self.process.join(_EXIT_CODE_TIMEOUT_S)  # the pipe closes shortly before the exit code is known
        exit_code = self.process.exitcode
        if exit_code is None or exit_code == _UNKNOWN_EXIT_CODE:
            return "ended"
        return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return bool(wait([self.sentinel], timeout_s))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, even if the fork server is dead, unlike the methods of `process`."""
        if not self.has_ended():
            assert self.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        wait([self.sentinel])
        self.connection.close()


class Supervisor:
    """The processes of a run, or of a part of it, which is over when the role `until` is done."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        weights_directory: Path,
        bodies: Mapping[str, WorkerBody],
        num_restarts: Counter[str],
        report: Callable[[str], None],
        until: str = "trainer",
    ) -> None:
        """Store the arguments. `num_restarts` counts the restarts of each role; `report` gets lines for the user."""
        self._recipe, self._run, self._weights_directory = recipe, run, weights_directory
        self._bodies, self._num_restarts, self._report = bodies, num_restarts, report
        self._until = until
        self._workers: dict[str, _Worker] = {}
        self._due_s: dict[str, float] = {}  # role -> time of its restart
        self._crashes_in_a_row: dict[str, int] = {}
        self._version_at_crash: dict[str, int] = {}
        self._last_watch_s = time.monotonic()
        self._has_begun = False
        self._alive, self._living = multiprocessing.Pipe(duplex=False)  # the second end stays in this process
        self.newest_version = 0  # from the metrics; an increase counts as progress
        self.results: dict[str, Any] = {}  # name of a process -> its result, if it has one

    def start(self) -> None:
        for role in {_role_of(name) for name in self._bodies}:
            self._start(role)

    def finished(self) -> bool:
        return self._until in self._workers and self._workers[self._until].done

    def watch(self, timeout_s: float) -> None:
        """Handle messages and ends of processes; wait up to `timeout_s` for the first.

        Raises: an error that a process reported; WorkerError if a process cannot be kept alive.
        """
        self._start_due()
        by_connection = {worker.connection: worker for worker in self._workers.values()}
        by_sentinel = {worker.sentinel: worker for worker in self._workers.values()}
        ended = wait([*by_connection, *by_sentinel], timeout_s)
        for item in ended:
            if isinstance(item, Connection):
                self._receive(by_connection[item])
        for item in ended:
            if isinstance(item, int):
                self._handle_end(by_sentinel[item])
        self._check_heartbeats()
        stopped = [name for name, worker in self._workers.items() if worker.done and _role_of(name) != self._until]
        if stopped and not self.finished():
            raise WorkerError(
                f"the {min(stopped)} process was stopped; to resume: midflight train {self._run.path} --resume"
            )

    def stop(self) -> None:
        """Ask all processes to save their state and stop; kill the processes that do not."""
        for worker in self._workers.values():
            worker.send_signal(signal.SIGTERM)
        for worker in self._workers.values():
            if not worker.has_ended(_STOP_TIMEOUT_S):
                worker.send_signal(signal.SIGKILL)
                wait([worker.sentinel])

    def check(self) -> None:
        """Read the remaining messages. Raises: an error that a process reported, such as a full disk while stopping."""
        for worker in self._workers.values():
            self._receive(worker)

    def _start(self, role: str) -> None:
        for name, body in self._bodies.items():
            if _role_of(name) == role:
                ours, theirs = multiprocessing.Pipe()
                heartbeat, num_restarts = RawValue(c_uint64), self._num_restarts[role]
                context = WorkerContext(
                    self._recipe, self._run, self._weights_directory, theirs, self._alive, heartbeat, num_restarts
                )
                try:
                    self._workers[name] = _Worker(name, body, context, ours)
                except (EOFError, OSError) as error:
                    self._restart(role, f"the {name} process could not be started ({error!r})")
                    return

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for role in [role for role, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[role]
            self._start(role)

    def _receive(self, worker: _Worker) -> None:
        try:
            while worker.connection.poll():
                match worker.connection.recv():
                    case ("ready",):
                        worker.ready = True
                        self._begin_ready()
                    case ("note", text):
                        self._report(text)
                    case ("result", value):
                        self.results[worker.name] = value
                    case ("done",):
                        worker.done = True
                    case ("crashed", text):
                        worker.failure = text
                    case ("failed", exit_code, text):
                        error = WorkerError(text)
                        error.exit_code = exit_code
                        raise error
        except (EOFError, OSError):  # the process is gone
            return

    def _begin_ready(self) -> None:
        """Let ready workers begin: the first time all together, after a restart each as soon as it is ready."""
        ready = [worker for worker in self._workers.values() if worker.ready]
        self._has_begun = self._has_begun or len(ready) == len(self._bodies)
        if self._has_begun:
            for worker in ready:
                worker.begin()

    def _handle_end(self, worker: _Worker) -> None:
        if self._workers.get(worker.name) is not worker:
            return  # another rank of the role has ended too, and the whole role was restarted
        self._receive(worker)
        if not worker.done:
            how = worker.failure or f"the {worker.name} process {worker.describe_end()}"
            self._restart(_role_of(worker.name), how)

    def _check_heartbeats(self) -> None:
        now_s = time.monotonic()
        tick_s = min(now_s - self._last_watch_s, _MAX_TICK_S)
        self._last_watch_s = now_s
        patience_s = self._recipe.supervisor.heartbeat_timeout_s
        for worker in list(self._workers.values()):
            worker.tick(tick_s)
            if worker.silent_s > patience_s and not worker.done and self._workers.get(worker.name) is worker:
                self._restart(_role_of(worker.name), f"the {worker.name} process has hung for {patience_s:g} s")

    def _restart(self, role: str, why: str) -> None:
        """Kill all ranks of the role and schedule a restart. Raises: WorkerError after too many crashes in a row."""
        for name in [name for name in self._workers if _role_of(name) == role]:
            self._workers.pop(name).kill()
        settings = self._recipe.supervisor
        has_progress = self.newest_version > self._version_at_crash.get(role, -1)
        in_a_row = 1 if has_progress else self._crashes_in_a_row[role] + 1
        self._crashes_in_a_row[role], self._version_at_crash[role] = in_a_row, self.newest_version
        if in_a_row > settings.max_restarts:
            again = f", {in_a_row} times without an optimizer step" if in_a_row > 1 else ""
            raise WorkerError(
                f"{why}{again}; its log is {self._run.log(role)};"
                f" to resume from the last checkpoint: midflight train {self._run.path} --resume"
            )
        delay_s = min(settings.backoff_s * 2 ** (in_a_row - 1), _MAX_BACKOFF_S)
        self._report(f"{why}; restart in {delay_s:g} s")
        warm_up()
        self._due_s[role] = time.monotonic() + delay_s
        self._num_restarts[role] += 1


def _role_of(name: str) -> str:
    return "trainer" if name.startswith("trainer-") else name
