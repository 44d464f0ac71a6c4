"""The processes of a run: started together, heard, and started again when they die or hang.

waits for      a message or the end of a process
unblocked by   either; heartbeats are looked at in every `watch`

A process is of a role, as `rollout`; the ranks of one role, `trainer`, `trainer-1`, ..., live and die together.
Processes are forks of a fork server. They outlive it, and it is started again when it is needed.
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

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import WorkerError
from midflight.run.worker_process import WorkerBody, WorkerContext, run_worker

_STOP_TIMEOUT_S = 60.0
_EXIT_CODE_TIMEOUT_S = 5.0  # the fork server, which knows exit codes, may be stopped
_UNKNOWN_EXIT_CODE = 255  # of a process that outlived its fork server
_MAX_BACKOFF_S = 60.0
# Time in which the supervisor itself did not run, as after Ctrl-Z, is not held against the processes.
_MAX_TICK_S = 1.0


def warm_up() -> None:
    """Start the fork server unless it runs. It imports in the background what workers need.

    The trainer builds its model with transformers' own code, which the process of the supervisor never imports.
    """
    multiprocessing.set_forkserver_preload(["midflight.run.workers", "transformers.modeling_utils"])
    multiprocessing.forkserver.ensure_running()


class _Worker:
    """One process, from its start to its end."""

    def __init__(self, name: str, body: WorkerBody, context: WorkerContext, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.ready = self.done = self._has_begun = False
        self.failure: str | None = None  # what it said when it crashed
        self.silent_s = 0.0
        self._heartbeat, self._last_beat = context.heartbeat, 0
        self.process = multiprocessing.get_context("forkserver").Process(
            target=run_worker, args=(body, name, context), name=name
        )
        try:
            self.process.start()
            self.sentinel = self.process.sentinel  # ready at its end; of a fork, also at the end of the fork server
            if sys.platform == "linux":
                assert self.process.pid is not None
                self.sentinel = os.pidfd_open(self.process.pid)
                weakref.finalize(self, os.close, self.sentinel)
        except (EOFError, OSError):  # a process that was started all the same ends when `connection` does
            connection.close()
            raise
        finally:
            context.supervisor.close()

    def go(self) -> None:
        """Let it begin, unless it has."""
        if not self._has_begun:
            self._has_begun = True
            with contextlib.suppress(OSError):  # it has just died
                self.connection.send(("go",))

    def tick(self, seconds: float) -> None:
        """`seconds` went by; count them as silence unless its heart has beaten."""
        beat = self._heartbeat.value
        self.silent_s = self.silent_s + seconds if beat == self._last_beat else 0.0
        self._last_beat = beat

    def how_it_ended(self) -> str:
        self.process.join(_EXIT_CODE_TIMEOUT_S)  # its pipe closes a moment before its exit code is known
        exit_code = self.process.exitcode
        if exit_code is None or exit_code == _UNKNOWN_EXIT_CODE:
            return "ended"
        return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return bool(wait([self.sentinel], timeout_s))

    def send_signal(self, number: signal.Signals) -> None:
        """The same as of `process`, which sends none once its fork server is dead."""
        if not self.has_ended():
            assert self.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        wait([self.sentinel])
        self.connection.close()


class Supervisor:
    """The trainer decides when a run is over; whatever happens, all processes are stopped then."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        weights_directory: Path,
        bodies: Mapping[str, WorkerBody],
        num_restarts: Counter[str],
        report: Callable[[str], None],
    ) -> None:
        """`num_restarts` of each role is counted up; `report` gets what there is to say to the user."""
        self._recipe, self._run, self._weights_directory = recipe, run, weights_directory
        self._bodies, self._num_restarts, self._report = bodies, num_restarts, report
        self._workers: dict[str, _Worker] = {}
        self._due_s: dict[str, float] = {}  # role -> when it is started again
        self._crashes_in_a_row: dict[str, int] = {}
        self._version_at_crash: dict[str, int] = {}
        self._last_watch_s = time.monotonic()
        self._has_begun = False
        self._alive, self._living = multiprocessing.Pipe(duplex=False)  # the second end stays in this process
        self.newest_version = 0  # as the metrics say; what counts as progress

    def start(self) -> None:
        for role in {_role_of(name) for name in self._bodies}:
            self._start(role)

    def finished(self) -> bool:
        return "trainer" in self._workers and self._workers["trainer"].done

    def watch(self, timeout_s: float) -> None:
        """Handle what the processes say, and their ends, until the timeout.

        Raises: what a process reported; WorkerError if one cannot be kept alive.
        """
        self._start_due()
        by_connection = {worker.connection: worker for worker in self._workers.values()}
        by_sentinel = {worker.sentinel: worker for worker in self._workers.values()}
        ended = wait([*by_connection, *by_sentinel], timeout_s)
        for item in ended:
            if isinstance(item, Connection):
                self._hear(by_connection[item])
        for item in ended:
            if isinstance(item, int):
                self._note_end(by_sentinel[item])
        self._check_heartbeats()
        stopped = [name for name, worker in self._workers.items() if worker.done and _role_of(name) != "trainer"]
        if stopped and not self.finished():
            raise WorkerError(
                f"the {min(stopped)} process was stopped; go on with: midflight train {self._run.path} --resume"
            )

    def stop(self) -> None:
        """Ask all of them to stop and to write what they have to; kill what does not listen."""
        for worker in self._workers.values():
            worker.send_signal(signal.SIGTERM)
        for worker in self._workers.values():
            if not worker.has_ended(_STOP_TIMEOUT_S):
                worker.send_signal(signal.SIGKILL)
                wait([worker.sentinel])

    def check(self) -> None:
        """Raises: what a process reported and nobody has heard yet, such as a disk that was full when it stopped."""
        for worker in self._workers.values():
            self._hear(worker)

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

    def _hear(self, worker: _Worker) -> None:
        try:
            while worker.connection.poll():
                match worker.connection.recv():
                    case ("ready",):
                        worker.ready = True
                        self._let_go()
                    case ("note", text):
                        self._report(text)
                    case ("done",):
                        worker.done = True
                    case ("crashed", text):
                        worker.failure = text
                    case ("failed", exit_code, text):
                        error = WorkerError(text)
                        error.exit_code = exit_code
                        raise error
        except (EOFError, OSError):  # it is gone
            return

    def _let_go(self) -> None:
        """All together at first; later, when they were started again, each as soon as it is set up."""
        ready = [worker for worker in self._workers.values() if worker.ready]
        self._has_begun = self._has_begun or len(ready) == len(self._bodies)
        if self._has_begun:
            for worker in ready:
                worker.go()

    def _note_end(self, worker: _Worker) -> None:
        if self._workers.get(worker.name) is not worker:
            return  # another rank has ended too, and both were dealt with
        self._hear(worker)
        if not worker.done:
            how = worker.failure or f"the {worker.name} process {worker.how_it_ended()}"
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
        """Raises: WorkerError if that was tried too often."""
        for name in [name for name in self._workers if _role_of(name) == role]:
            self._workers.pop(name).kill()
        settings = self._recipe.supervisor
        went_on = self.newest_version > self._version_at_crash.get(role, -1)
        in_a_row = 1 if went_on else self._crashes_in_a_row[role] + 1
        self._crashes_in_a_row[role], self._version_at_crash[role] = in_a_row, self.newest_version
        if in_a_row > settings.max_restarts:
            again = f", {in_a_row} times without an optimizer step" if in_a_row > 1 else ""
            raise WorkerError(
                f"{why}{again}; its log is {self._run.log(role)};"
                f" go on from the last checkpoint with: midflight train {self._run.path} --resume"
            )
        delay_s = min(settings.backoff_s * 2 ** (in_a_row - 1), _MAX_BACKOFF_S)
        self._report(f"{why}; it is started again in {delay_s:g} s")
        warm_up()
        self._due_s[role] = time.monotonic() + delay_s
        self._num_restarts[role] += 1


def _role_of(name: str) -> str:
    return name.partition("-")[0]
