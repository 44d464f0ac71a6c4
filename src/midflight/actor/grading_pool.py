"""Grading in processes of its own: a verifier that hangs, crashes or leaks costs its rollout, never the run.

actor                                             grading process
submit    waits for: nothing                      consumes: a few responses at a time
results   waits for: a result, a death,           waits for: the next ones
          a verifier's deadline                   unblocked by: submit, results; ends with its parent
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import NamedTuple

from midflight.actor.grading import grade_response
from midflight.errors import RolloutError
from midflight.protocols import Environment
from midflight.types import GradedResponse, Problem, RolloutId

# Handed over at once: saves messages, yet holds few responses up behind a slow one, and their results fit the pipe.
_MAX_AT_ONCE = 32
# A process that dies may have been killed by somebody else; a response that kills it twice is to blame.
_MAX_ATTEMPTS = 2
_MAX_TIMEOUTS_IN_A_ROW = 8  # each costs its full time, so a verifier that only hangs must end the run soon
_START_TIMEOUT_S = 300.0  # an environment may load a dataset first

_READY, _BROKEN = "ready", "broken"


class _Job(NamedTuple):
    rollout_id: RolloutId
    problem: Problem
    response: str
    num_deaths: int = 0


class GradingPool:
    """Implements Grader with `num_processes` processes, each with an environment of its own from `make_environment`.

    A verifier that takes longer than `timeout_s` is killed and its rollout fails; so does one that ends its process.
    Raises: RolloutError from `results` if the environment cannot be made there, or nothing but timeouts comes back.
    """

    def __init__(self, make_environment: Callable[[], Environment], num_processes: int, timeout_s: float) -> None:
        self._make_environment, self._timeout_s = make_environment, timeout_s
        self._queue: deque[_Job] = deque()
        self._num_pending = 0
        self._timeouts_in_a_row = 0
        self._workers = [_Worker(make_environment) for _ in range(num_processes)]

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, rollout_id: RolloutId, problem: Problem, response: str) -> None:
        self._queue.append(_Job(rollout_id, problem, response))
        self._num_pending += 1

    def results(self, timeout_s: float = 0.0) -> list[GradedResponse]:
        """What has been graded since the last call; waits up to `timeout_s` for the first."""
        deadline_s = time.monotonic() + timeout_s
        results = self._turn(0.0)
        while self._num_pending and not results and (left_s := deadline_s - time.monotonic()) > 0:
            results = self._turn(left_s)
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

    def _turn(self, timeout_s: float) -> list[GradedResponse]:
        """Hand over, wait once, take in."""
        self._dispatch()
        next_deadline_s = min(worker.deadline_s for worker in self._workers)
        wait(
            [source for worker in self._workers for source in worker.sources()],
            max(0.0, min(timeout_s, next_deadline_s - time.monotonic())),
        )
        results: list[GradedResponse] = []
        for index, worker in enumerate(self._workers):
            results += worker.receive(self._timeout_s)
            if results:
                self._timeouts_in_a_row = 0
            # Results that are there count, however late they were looked at.
            if worker.is_dead() or time.monotonic() >= worker.deadline_s:
                results += self._replace(index)
        self._num_pending -= len(results)
        self._dispatch()
        return results

    def _dispatch(self) -> None:
        idle = [worker for worker in self._workers if worker.is_idle()]
        for num_left, worker in zip(range(len(idle), 0, -1), idle, strict=True):
            num_jobs = min(_MAX_AT_ONCE, -(-len(self._queue) // num_left))
            if num_jobs:
                worker.send([self._queue.popleft() for _ in range(num_jobs)], self._timeout_s)

    def _replace(self, index: int) -> list[GradedResponse]:
        """A new process for one that died or is late; the response it was at is to blame, or is tried once more."""
        worker = self._workers[index]
        died = worker.is_dead()
        worker.kill()
        if not worker.ready:
            raise RolloutError(f"a process that grades ended before it was ready ({worker.how_it_ended()})")
        self._workers[index] = _Worker(self._make_environment)
        if not worker.jobs:
            return []
        job = worker.jobs.popleft()
        self._queue.extendleft(reversed(worker.jobs))
        if not died:
            return [self._timed_out(job)]
        if job.num_deaths + 1 < _MAX_ATTEMPTS:
            self._queue.appendleft(job._replace(num_deaths=job.num_deaths + 1))
            return []
        return [GradedResponse(job.rollout_id, None, f"the verifier ended its process ({worker.how_it_ended()})")]

    def _timed_out(self, job: _Job) -> GradedResponse:
        self._timeouts_in_a_row += 1
        why = f"the verifier took longer than task.grading_timeout_s = {self._timeout_s:g}"
        if self._timeouts_in_a_row >= _MAX_TIMEOUTS_IN_A_ROW:
            raise RolloutError(f"{why}, {self._timeouts_in_a_row} times in a row")
        return GradedResponse(job.rollout_id, None, why)


class _Worker:
    """The parent's end of one grading process."""

    def __init__(self, make_environment: Callable[[], Environment]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_grade_until_closed, args=(make_environment, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.ready = False
        self.jobs: deque[_Job] = deque()  # handed over and not answered, in order
        self.deadline_s = time.monotonic() + _START_TIMEOUT_S
        self._closed = False

    def sources(self) -> list[Connection | int]:
        return [self._connection, self._process.sentinel]

    def is_idle(self) -> bool:
        return self.ready and not self.jobs and not self._closed

    def is_dead(self) -> bool:
        return self._closed

    def how_it_ended(self) -> str:
        exit_code = self._process.exitcode
        return f"signal {-exit_code}" if exit_code and exit_code < 0 else f"code {exit_code}"

    def send(self, jobs: list[_Job], timeout_s: float) -> None:
        """It waits for them and reads them at once, so this does not wait."""
        self.jobs.extend(jobs)
        self.deadline_s = time.monotonic() + timeout_s
        try:
            self._connection.send(jobs)
        except OSError:  # it has just died, which `receive` will find out
            return

    def receive(self, timeout_s: float) -> list[GradedResponse]:
        """The answers that are there.

        Raises: RolloutError if it could not make its environment.
        """
        answers: list[GradedResponse] = []
        try:
            while self._connection.poll():
                match self._connection.recv():
                    case (str(kind), str(text)) if kind == _BROKEN:
                        raise RolloutError(f"the environment cannot be made in a process that grades: {text}")
                    case str():
                        self.ready = True
                    case GradedResponse() as answer:
                        self.jobs.popleft()
                        answers.append(answer)
                self.deadline_s = time.monotonic() + timeout_s if self.jobs else float("inf")
        except (EOFError, OSError):
            self._closed = True
        return answers

    def kill(self) -> None:
        died = self._closed
        if not died:
            self._process.kill()
        self._process.join()
        self._connection.close()
        self._closed = True


def _grade_until_closed(make_environment: Callable[[], Environment], connection: Connection) -> None:
    """The body of a grading process. What a verifier prints goes to the log of the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        environment = make_environment()
    except Exception as error:
        connection.send((_BROKEN, f"{type(error).__name__}: {error}"))
        return
    connection.send(_READY)
    while True:
        try:
            jobs: list[_Job] = connection.recv()
            for job in jobs:
                connection.send(grade_response(environment, job.rollout_id, job.problem, job.response))
        except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody is left to grade for
            return


def _end_with_parent() -> None:
    """A verifier that hangs must not outlive a run that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
