"""A worker process of any role: its signals, log, lock, and connection to the supervisor.

A worker sends ("ready",) when it is set up, and waits for ("go",). It ends with ("done",), with ("crashed", text), or,
if a restart would not help, with ("failed", exit_code, text). It may send ("note", text) for the user at any time, and
("result", value) before ("done",).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import MidflightError
from midflight.launch.users_modules import use_directory_of

# Shorter than the time for which a resumed run waits for the workers of the earlier run.
_ORPHAN_GRACE_S = 30.0
_END_OF_SUPERVISOR_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Arguments of a worker process."""

    recipe: Recipe
    run: RunDirectory
    weights_directory: Path
    supervisor: Connection
    alive: Connection  # carries no data; it closes when the supervisor ends, the only holder of the other end
    heartbeat: Any  # a c_uint64 in shared memory
    num_restarts: int  # of this role, before this process

    def should_stop(self) -> bool:
        """Return True if a stop was requested or the supervisor is gone; also advance the heartbeat.

        Every loop calls it in every iteration, which shows that the process has not hung.
        """
        self.heartbeat.value += 1
        return _stop_requested or self.is_orphan()

    def is_orphan(self) -> bool:
        """Return True if the supervisor was killed."""
        return bool(_hang_up_poll(self.alive.fileno()).poll(0))

    def remove_weights(self) -> None:
        """Remove the shared weights.

        Other workers and threads may remove them, or add a file to the directory, at the same time.
        """
        removed = self.weights_directory.with_suffix(".removed")
        with contextlib.suppress(OSError):
            self.weights_directory.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        self.run.spare_weights.unlink(missing_ok=True)

    @property
    def weights_path(self) -> Path:
        return self.weights_directory / "weights"

    @property
    def lineage(self) -> str:
        """Text that is new at every start of the supervisor; see WeightTransport."""
        return self.weights_directory.name

    def wait_until(self, happens: Callable[[float], bool]) -> None:
        """Wait until `happens(timeout_s)` returns True; end the process if it should stop before that."""
        while not happens(WAIT_SLICE_S):
            if self.should_stop():
                raise SystemExit(0)

    def tell(self, *message: object) -> None:
        with contextlib.suppress(OSError):  # the supervisor may have been killed
            self.supervisor.send(message)


_stop_requested = False
_has_begun = threading.Event()


@functools.cache
def _hang_up_poll(*descriptors: int) -> select.poll:
    """Return a poll that reports when another end is closed. Cached: workers use it at every token."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    return poll


WorkerBody = Callable[[WorkerContext], None]


def run_worker(body: WorkerBody, name: str, context: WorkerContext) -> None:
    """Run `body` as a worker process, with its output in the log; report its end to the supervisor."""
    _redirect_output(context.run.log(name))
    # Ctrl-C reaches the whole terminal group; only the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _request_stop)
    import torch  # here, because the supervisor imports this module

    torch.set_num_interop_threads(1)
    with context.run.worker_locked(name):
        threading.Thread(target=_end_with_supervisor, args=(name, context), daemon=True).start()
        try:
            if not context.is_orphan():  # otherwise the run may have been resumed before this worker took the lock
                _run(body, name, context)
        finally:
            if context.is_orphan():  # the supervisor cannot remove them any more
                context.remove_weights()


def _run(body: WorkerBody, name: str, context: WorkerContext) -> None:
    use_directory_of(context.recipe)
    try:
        body(context)
    except MidflightError as error:
        traceback.print_exc()
        context.tell("failed", error.exit_code, str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        context.tell("crashed", f"the {name} process failed: {type(error).__name__}: {error}")
        sys.exit(1)
    context.tell("done")


def start_together(
    context: WorkerContext, wait_until: Callable[[Callable[[float], bool]], object] | None = None
) -> None:
    """Wait until all workers are set up, so that the clock of the run starts then.

    `wait_until`: in place of the context's, for a worker with work to do meanwhile.
    """
    context.tell("ready")
    (wait_until or context.wait_until)(context.supervisor.poll)
    try:
        context.supervisor.recv()
    except (EOFError, OSError):
        _supervisor_ends(context)  # gives `alive` time to close: run_worker checks it next
        raise SystemExit(0) from None
    _has_begun.set()


def _end_with_supervisor(name: str, context: WorkerContext) -> None:
    """End this process after its supervisor, even where it cannot call `should_stop`, as in a collective operation.

    A process that has begun gets time for its step and its checkpoint; before that there is nothing to save.
    The supervisor also closes the connection of a process that it could not start properly.
    """
    _hang_up_poll(context.alive.fileno(), context.supervisor.fileno()).poll()
    if _has_begun.is_set():
        time.sleep(_ORPHAN_GRACE_S)
    print(f"the {name} process ends: its supervisor is gone and it did not stop", file=sys.stderr, flush=True)
    if _supervisor_ends(context):
        context.remove_weights()
    os._exit(1)


def _supervisor_ends(context: WorkerContext) -> bool:
    """Wait briefly for the supervisor's end; return True if it ended.

    Called once its connection is closed: the kernel closes the files of a dead process one after the other.
    """
    return bool(wait([context.alive], _END_OF_SUPERVISOR_S))


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _request_stop(*_: object) -> None:
    global _stop_requested
    _stop_requested = True
