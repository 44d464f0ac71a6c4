"""A process of a run, whatever its role: signals, its log, its lock, a line to the supervisor.

A worker says ("ready",) when it is set up, waits for ("go",), and ends with ("done",), with ("crashed", text), or, if
starting it again would not help, with ("failed", exit_code, text). ("note", text) is for the user, at any time.
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

import torch

from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import MidflightError

# Less than a resumed run waits for the workers of the last one.
_ORPHAN_GRACE_S = 30.0
_END_OF_SUPERVISOR_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker process is started with."""

    recipe: Recipe
    run: RunDirectory
    weights_directory: Path
    supervisor: Connection
    alive: Connection  # nothing is ever sent; it closes with the supervisor, which alone has the other end
    heartbeat: Any  # a c_uint64 in shared memory
    num_restarts: int  # of this role, before this process

    def should_stop(self) -> bool:
        """Asked to, or nobody is left to ask. Every loop asks in every turn, which shows that it has not hung."""
        self.heartbeat.value += 1
        return _stop_requested or self.is_orphan()

    def is_orphan(self) -> bool:
        """Whether the supervisor was killed."""
        return bool(_hang_up_of(self.alive.fileno()).poll(0))

    def remove_weights(self) -> None:
        """Another worker, or another thread of this one, may do the same or put a file there at the same time."""
        removed = self.weights_directory.with_suffix(".removed")
        with contextlib.suppress(OSError):
            self.weights_directory.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        self.run.spare_weights.unlink(missing_ok=True)

    @property
    def weights_path(self) -> Path:
        return self.weights_directory / "weights"

    def wait_until(self, happens: Callable[[float], bool]) -> None:
        """`happens(timeout_s)` waits and says whether it did. Ends the process if it should stop meanwhile."""
        while not happens(WAIT_SLICE_S):
            if self.should_stop():
                raise SystemExit(0)

    def tell(self, *message: object) -> None:
        with contextlib.suppress(OSError):  # a supervisor that was killed hears nothing
            self.supervisor.send(message)


_stop_requested = False
_has_begun = threading.Event()


@functools.cache
def _hang_up_of(*descriptors: int) -> select.poll:
    """A poll that reports when the other end of one of these is closed. Kept: workers ask at every token."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    return poll


WorkerBody = Callable[[WorkerContext], None]


def run_worker(body: WorkerBody, name: str, context: WorkerContext) -> None:
    """The entry point of a worker process: `body` with its output in the log and its end reported."""
    _redirect_output(context.run.log(name))
    # Ctrl-C reaches the whole terminal group; only the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _request_stop)
    torch.set_num_interop_threads(1)
    with context.run.worker_locked(name):
        threading.Thread(target=_end_with_supervisor, args=(name, context), daemon=True).start()
        try:
            if not context.is_orphan():  # or the run may have gone on without it before it took the lock
                _run(body, name, context)
        finally:
            if context.is_orphan():  # nobody else is left to remove them; another worker may be at it too
                context.remove_weights()


def _run(body: WorkerBody, name: str, context: WorkerContext) -> None:
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


def start_together(context: WorkerContext) -> None:
    """So that the clock of the run starts when all sides are set up."""
    context.tell("ready")
    context.wait_until(context.supervisor.poll)
    try:
        context.supervisor.recv()
    except (EOFError, OSError):
        _supervisor_ends(context)  # the end of this process, which comes next, has to know
        raise SystemExit(0) from None
    _has_begun.set()


def _end_with_supervisor(name: str, context: WorkerContext) -> None:
    """End this process if it is left alone where it does not ask whether it should stop, as in a collective.

    Before it has begun it has nothing to write. Later it gets time for its step and its checkpoint.
    The supervisor also closes the connection of a process that it could not start properly.
    """
    _hang_up_of(context.alive.fileno(), context.supervisor.fileno()).poll()
    if _has_begun.is_set():
        time.sleep(_ORPHAN_GRACE_S)
    print(f"the {name} process ends: its supervisor is gone and it did not stop", file=sys.stderr, flush=True)
    if _supervisor_ends(context):
        context.remove_weights()
    os._exit(1)


def _supervisor_ends(context: WorkerContext) -> bool:
    """Return whether it ends, now that its connection is closed: the kernel closes its files one after the other."""
    return bool(wait([context.alive], _END_OF_SUPERVISOR_S))


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _request_stop(*_: object) -> None:
    global _stop_requested
    _stop_requested = True
