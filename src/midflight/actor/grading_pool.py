"""Grading in separate processes: a verifier that hangs, crashes or leaks costs its rollout, never the run.

actor                                             grading process
submit    waits for: nothing                      consumes: a few responses at a time
results   waits for: a result, a dead process,    waits for: the next responses
          a verifier's deadline                   unblocked by: submit, results; ends with its parent
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import TracebackType
from typing import NamedTuple

from midflight.actor.failures import reason_of
from midflight.actor.grading import LiveEpisodes
from midflight.errors import RolloutError
from midflight.protocols import Environment, GradedTask
from midflight.types import GradedResponse, Problem, RolloutId

# Largest message to a grading process. Large messages save overhead; small ones delay few responses behind a slow one,
# and fit into the pipe.
_MAX_AT_ONCE = 32
_MAX_CHARACTERS_AT_ONCE = 32_768
_MAX_STALL_S = 1.0  # timeout of a send through a full pipe, if the process does not read
_PARENT_CHECK_S = 1.0
# The first death may come from outside, so the response being graded is tried again; the second one is its fault.
_MAX_ATTEMPTS = 2
_MAX_TIMEOUTS_IN_A_ROW = 8  # each costs its full time, so a verifier that always hangs must end the run soon
_START_TIMEOUT_S = 300.0  # an environment may load a dataset first

MakeEnvironment = Callable[[], Environment | GradedTask]
_READY, _BROKEN = "ready", "broken"


class _Job(NamedTuple):
    rollout_ids: tuple[RolloutId, ...]  # one, or the members of a group
    problem: Problem
    responses: tuple[str, ...]  # all of the episode so far, so that any process can continue it; or one per member
    is_group: bool = False
    num_deaths: int = 0

    def failed(self, why: str) -> list[GradedResponse]:
        return [GradedResponse(rollout_id, None, why) for rollout_id in self.rollout_ids]


class GradingPool:
    """Implements Grader with `num_processes` processes, each with its own environment from `make_environment`.

    A verifier that takes longer than `timeout_s` is killed, with all processes that it started, and its rollout fails.
    A group has `timeout_s` for each of its responses, and fails as a whole.
    If a verifier ends its process, its rollout fails, too.
    Raises: RolloutError if a process cannot make the environment, or too many timeouts follow each other.
    """

    def __init__(self, make_environment: MakeEnvironment, num_processes: int, timeout_s: float) -> None:
        self._make_environment, self._timeout_s = make_environment, timeout_s
        self._queue: deque[_Job] = deque()
        self._done: list[GradedResponse] = []
        self._num_pending = 0
        self._timeouts_in_a_row = self._deaths_at_start = 0
        self._workers = [_Worker(make_environment) for _ in range(num_processes)]

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait for every process to make its environment; return True if all have one."""
        deadline_s = time.monotonic() + timeout_s
        while not all(worker.ready for worker in self._workers):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._exchange(left_s)
        return True

    def submit(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> None:
        self._queue.append(_Job((rollout_id,), problem, tuple(responses)))
        self._num_pending += 1

    def submit_group(self, rollout_ids: Sequence[RolloutId], problem: Problem, responses: Sequence[str]) -> None:
        self._queue.append(_Job(tuple(rollout_ids), problem, tuple(responses), is_group=True))
        self._num_pending += len(rollout_ids)

    def results(self, timeout_s: float = 0.0) -> list[GradedResponse]:
        """Return the answers since the last call; wait up to `timeout_s` for the first one."""
        deadline_s = time.monotonic() + timeout_s
        self._exchange(0.0)
        while self._num_pending and not self._done and (left_s := deadline_s - time.monotonic()) > 0:
            self._exchange(left_s)
        results, self._done = self._done, []
        self._num_pending -= len(results)
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, timeout_s: float) -> None:
        """Send jobs, wait once, and receive answers."""
        self._dispatch()
        next_deadline_s = min(worker.deadline_s for worker in self._workers)
        wait(
            [source for worker in self._workers for source in worker.sources()],
            max(0.0, min(timeout_s, next_deadline_s - time.monotonic())),
        )
        for index, worker in enumerate(self._workers):
            # Answers that have arrived count, even if they are read late or the process has died since.
            died = worker.is_dead()
            answers = worker.receive(self._timeout_s)
            if answers:
                self._timeouts_in_a_row = 0
            if worker.ready:
                self._deaths_at_start = 0
            self._done += answers
            if died or time.monotonic() >= worker.deadline_s:
                self._done += self._replace(index, died)
        self._dispatch()

    def _dispatch(self) -> None:
        # An equal share per worker, also for busy and starting ones: a hang delays every job in the same message.
        num_jobs = min(_MAX_AT_ONCE, -(-len(self._queue) // len(self._workers)))
        for worker in self._workers:
            if self._queue and worker.is_idle():
                worker.send(self._next_jobs(num_jobs), self._timeout_s)

    def _next_jobs(self, num_jobs: int) -> list[_Job]:
        jobs: list[_Job] = []
        num_characters = 0
        while self._queue and len(jobs) < num_jobs and num_characters < _MAX_CHARACTERS_AT_ONCE:
            job = self._queue.popleft()
            jobs.append(job)
            num_characters += sum(map(len, job.responses))
        return jobs

    def _replace(self, index: int, died: bool) -> list[GradedResponse]:
        """Replace a process that died or is late; its current response fails or is tried once more."""
        worker = self._workers[index]
        worker.kill()
        if not worker.ready:
            self._note_bad_start(worker, died)
        self._workers[index] = _Worker(self._make_environment)
        if not worker.jobs:
            return []
        job = worker.jobs.popleft()
        self._queue.extendleft(reversed(worker.jobs))
        if not died:
            return self._timed_out(job)
        if job.num_deaths + 1 < _MAX_ATTEMPTS:
            self._queue.appendleft(job._replace(num_deaths=job.num_deaths + 1))
            return []
        return job.failed(f"the verifier ended its process ({worker.exit_reason()})")

    def _note_bad_start(self, worker: _Worker, died: bool) -> None:
        if not died:
            raise RolloutError(f"a grading process took longer than {_START_TIMEOUT_S:g} s to make the environment")
        self._deaths_at_start += 1
        if self._deaths_at_start >= _MAX_ATTEMPTS:
            raise RolloutError(f"a grading process ended before it was ready ({worker.exit_reason()})")

    def _timed_out(self, job: _Job) -> list[GradedResponse]:
        self._timeouts_in_a_row += 1
        why = f"the verifier took longer than task.grading_timeout_s = {self._timeout_s:g}"
        if job.is_group:
            why += f" for each of {len(job.rollout_ids)} responses"
        if self._timeouts_in_a_row >= _MAX_TIMEOUTS_IN_A_ROW:
            raise RolloutError(f"{why}, {self._timeouts_in_a_row} times in a row")
        return job.failed(why)


class _Worker:
    """The parent's end of one grading process."""

    def __init__(self, make_environment: MakeEnvironment) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        _limit_stalls(self._connection)
        # Not a multiprocessing daemon: daemons must not start processes, and a verifier may need to.
        self._process = spawn.Process(target=_grade_until_closed, args=(make_environment, theirs))
        self._process.start()
        theirs.close()
        self.ready = False
        self.jobs: deque[_Job] = deque()  # sent and not answered, in order
        self.deadline_s = time.monotonic() + _START_TIMEOUT_S
        self._closed = False  # True once no more answers can come
        # A finalizer, since a pool may never be closed: the interpreter would wait for these processes at exit.
        self._kill = Finalize(self, _kill_group, (self._process,), exitpriority=0)

    def sources(self) -> list[Connection | int]:
        """Objects to wait for. If a verifier closed the connection, only the end of the process is left to wait for."""
        return [self._process.sentinel] if self._closed else [self._connection, self._process.sentinel]

    def is_idle(self) -> bool:
        return self.ready and not self.jobs and not self._closed

    def is_dead(self) -> bool:
        return self._process.exitcode is not None

    def exit_reason(self) -> str:
        exit_code = self._process.exitcode
        return f"signal {-exit_code}" if exit_code and exit_code < 0 else f"code {exit_code}"

    def send(self, jobs: list[_Job], timeout_s: float) -> None:
        """Send jobs to the idle process, which reads at once, so this does not wait."""
        self.jobs.extend(jobs)
        self.deadline_s = self._next_deadline_s(timeout_s)
        try:
            self._connection.send(jobs)
        except OSError:  # the process has just died, or a thread left behind by a verifier keeps it from reading
            self._closed = True

    def receive(self, timeout_s: float) -> list[GradedResponse]:
        """Return the answers that have arrived.

        Raises: RolloutError if the process could not make its environment.
        """
        answers: list[GradedResponse] = []
        try:
            while not self._closed and self._connection.poll():
                match self._connection.recv():
                    case (str(kind), str(text)) if kind == _BROKEN:
                        raise RolloutError(f"a grading process cannot make the environment: {text}")
                    case str():
                        self.ready = True
                    case GradedResponse() as answer:
                        self.jobs.popleft()
                        answers.append(answer)
                    case list(group):
                        self.jobs.popleft()
                        answers += group
                self.deadline_s = self._next_deadline_s(timeout_s)
        except (EOFError, OSError):
            self._closed = True
            self.deadline_s = min(self.deadline_s, time.monotonic() + timeout_s)
        return answers

    def _next_deadline_s(self, timeout_s: float) -> float:
        """Time by which the answer to the next job is due; a group has the timeout of each of its members."""
        return time.monotonic() + timeout_s * len(self.jobs[0].rollout_ids) if self.jobs else float("inf")

    def kill(self) -> None:
        self._kill()
        self._process.join()
        self._connection.close()


def _limit_stalls(connection: Connection) -> None:
    """Turn a read or write that stalls within a message into an OSError."""
    limit = struct.pack("ll", int(_MAX_STALL_S), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _kill_group(process: BaseProcess) -> None:
    """Kill the process and all processes that its verifiers started; it leads their process group."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _grade_until_closed(make_environment: MakeEnvironment, connection: Connection) -> None:
    """Body of a grading process. A verifier's output goes to the log of the parent process."""
    os.setpgrp()  # also keeps Ctrl-C in a terminal from this process; the parent handles it
    _end_with_parent()
    try:
        episodes = LiveEpisodes(make_environment())
    except Exception as error:
        connection.send((_BROKEN, reason_of(error)))
        return
    connection.send(_READY)
    while True:
        try:
            jobs: list[_Job] = connection.recv()
            for job in jobs:
                if job.is_group:
                    connection.send(episodes.answer_group(job.rollout_ids, job.problem, job.responses))
                else:
                    connection.send(episodes.answer(job.rollout_ids[0], job.problem, job.responses))
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
            return


def _end_with_parent() -> None:
    """Kill this process group when the parent ends, even if a verifier hangs.

    On Linux, the kernel sends the signal: no thread can run beside a C function that holds the interpreter's lock.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        sentinel = parent.sentinel
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def kill_group_after_parent() -> None:
        parent.join()
        while os.getppid() == parent.pid:  # join() returns early if a verifier closes every file descriptor
            time.sleep(_PARENT_CHECK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=kill_group_after_parent, daemon=True).start()
