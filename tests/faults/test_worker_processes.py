"""Worker processes live exactly as long as their supervisor lets them, whatever else is killed."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import workers
from faults.runs import is_running
from faults.workers import TIMEOUT_S, pids_of, supervised, wait_for_a_stop

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="this looks into /proc")]


def fork_server() -> int:
    pid: int = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def kill_fork_server() -> None:
    pid = fork_server()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.faults
def test_workers_outlive_the_fork_server(tmp_path: Path) -> None:
    with supervised(tmp_path, {"trainer": wait_for_a_stop, "rollout": wait_for_a_stop}) as it:
        it.watch_until(lambda: len(it.pids()) == 2)
        first = it.pids()
        kill_fork_server()
        for _ in range(5):
            it.supervisor.watch(0.02)
        assert it.said == []
        assert all(is_running(pid) for pid in first)
        os.kill(min(first), signal.SIGKILL)
        it.watch_until(lambda: len(it.pids()) == 3)
        assert [text.split(" ", 2)[2] for text in it.said] == ["process ended; restart in 0 s"]
        assert it.weights.exists(), "a worker took the fork server for the supervisor"
    assert not any(is_running(pid) for pid in it.pids())


def test_a_fork_server_that_dies_at_a_start_costs_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = multiprocessing.forkserver.connect_to_new_process
    deaths = iter([True])

    def connect_and_die(descriptors: list[int]) -> tuple[int, int]:
        ends: tuple[int, int] = connect(descriptors)
        if next(deaths, False):
            os.read(ends[0], 8)  # the new process's number: as if the fork server had died before it told
            kill_fork_server()
        return ends

    monkeypatch.setattr(multiprocessing.forkserver, "connect_to_new_process", connect_and_die)
    with supervised(tmp_path, {"rollout": wait_for_a_stop}) as it:
        it.watch_until(lambda: sum(is_running(pid) for pid in it.pids()) == 1 and bool(it.said))
        assert it.said[0].startswith("the rollout process could not be started (EOFError")
        assert it.weights.exists()


def test_no_other_process_can_pass_for_the_supervisor(tmp_path: Path) -> None:
    """Its end is noticed when nobody has the writing end of its pipe any more."""
    with supervised(tmp_path, {"rollout": wait_for_a_stop}) as it:
        it.watch_until(lambda: len(it.pids()) == 1)
        pipe = os.readlink(f"/proc/self/fd/{it.supervisor._living.fileno()}")
        for pid in (*it.pids(), fork_server()):
            ends = [path for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path) == pipe]
            assert bool(ends) == (pid in it.pids())
            assert not any(is_writable(path) for path in ends)


def is_writable(descriptor: Path) -> bool:
    information = (descriptor.parents[1] / "fdinfo" / descriptor.name).read_text()
    flags = int(information.partition("flags:")[2].split()[0], 8)
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


@pytest.mark.parametrize(
    "body",
    [
        "wait_for_nothing",
        *(pytest.param(f"wait_for_{what}", marks=pytest.mark.faults) for what in ("a_stop", "another_rank")),
    ],
)
def test_a_worker_ends_with_its_supervisor_wherever_it_waits(tmp_path: Path, body: str) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, workers.__file__, tmp_path, body]) as supervisor:
        wait_until(lambda: bool(pids_of(run)))
        (pid,) = pids_of(run)
        assert is_running(pid)
        supervisor.kill()
    wait_until(lambda: not is_running(pid))
    assert not (tmp_path / "weights").exists()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
