"""Worker processes live as long as their supervisor, whichever other process is killed."""

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
from faults.workers import TIMEOUT_S, pids_of, supervised, wait_for_stop

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
    with supervised(tmp_path, {"trainer": wait_for_stop, "rollout": wait_for_stop}) as run:
        run.watch_until(lambda: len(run.pids()) == 2)
        first = run.pids()
        kill_fork_server()
        for _ in range(5):
            run.supervisor.watch(0.02)
        assert run.said == []
        assert all(is_running(pid) for pid in first)
        os.kill(min(first), signal.SIGKILL)
        run.watch_until(lambda: len(run.pids()) == 3)
        assert [text.split(" ", 2)[2] for text in run.said] == ["process ended; restart in 0 s"]
        assert run.weights.exists(), "a worker mistook the fork server for the supervisor"
    assert not any(is_running(pid) for pid in run.pids())


def test_a_fork_server_killed_during_a_start_costs_one_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = multiprocessing.forkserver.connect_to_new_process
    deaths = iter([True])

    def connect_and_die(descriptors: list[int]) -> tuple[int, int]:
        ends: tuple[int, int] = connect(descriptors)
        if next(deaths, False):
            os.read(ends[0], 8)  # the pid of the new process, as if the fork server had died before sending it
            kill_fork_server()
        return ends

    monkeypatch.setattr(multiprocessing.forkserver, "connect_to_new_process", connect_and_die)
    with supervised(tmp_path, {"rollout": wait_for_stop}) as run:
        run.watch_until(lambda: sum(is_running(pid) for pid in run.pids()) == 1 and bool(run.said))
        assert run.said[0].startswith("the rollout process could not be started (EOFError")
        assert run.weights.exists()


def test_only_the_supervisor_holds_its_pipe_open(tmp_path: Path) -> None:
    """Workers notice the end of the supervisor when no process holds the write end of its pipe."""
    with supervised(tmp_path, {"rollout": wait_for_stop}) as run:
        run.watch_until(lambda: len(run.pids()) == 1)
        pipe = os.readlink(f"/proc/self/fd/{run.supervisor._living.fileno()}")
        for pid in (*run.pids(), fork_server()):
            ends = [path for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path) == pipe]
            assert bool(ends) == (pid in run.pids())
            assert not any(is_writable(path) for path in ends)


def is_writable(descriptor: Path) -> bool:
    information = (descriptor.parents[1] / "fdinfo" / descriptor.name).read_text()
    flags = int(information.partition("flags:")[2].split()[0], 8)
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


@pytest.mark.parametrize(
    "body",
    [
        "wait_forever",
        *(pytest.param(f"wait_for_{event}", marks=pytest.mark.faults) for event in ("stop", "peer")),
    ],
)
def test_a_waiting_worker_ends_with_its_supervisor(tmp_path: Path, body: str) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, workers.__file__, tmp_path, body]) as supervisor:
        wait_until(lambda: bool(pids_of(run)))
        (pid,) = pids_of(run)
        assert is_running(pid)
        supervisor.kill()
    wait_until(lambda: not is_running(pid))
    assert not (tmp_path / "weights").exists()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
