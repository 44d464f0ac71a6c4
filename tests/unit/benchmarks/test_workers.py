"""Worker processes of benchmarks: answers, crashes, timeouts, and clean shutdown."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from benchmarks.workers import Worker

from midflight.errors import WorkerError

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
SLEEP = "import sys, time\nfor line in sys.stdin: time.sleep(60)"
DIE = "import sys\nsys.stdin.readline()\nraise SystemExit('out of luck')"


@pytest.fixture
def started() -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.close()


def python(code: str) -> Worker:
    return Worker([sys.executable, "-c", code], {})


def test_requests_are_answered_in_order(started: list[Worker]) -> None:
    started.append(python(ECHO))
    long = {"prompts": [list(range(10_000))] * 20}
    assert started[0].ask(long, 30) == long
    assert started[0].ask({"round": 1}, 30) == {"round": 1}


def test_late_answer_is_a_timeout() -> None:
    worker = python(SLEEP)
    with pytest.raises(TimeoutError):
        worker.ask({}, 0.2)
    worker.kill()
    worker.close()


def test_crash_reports_the_last_output_line(started: list[Worker]) -> None:
    started.append(python(DIE))
    with pytest.raises(WorkerError, match="out of luck"):
        started[0].ask({}, 30)
    started[0].kill()  # as callers do after any error


def test_closing_ends_the_process() -> None:
    with closing(python(ECHO)) as worker:
        worker.ask({}, 30)
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
