"""Verifiers that hang, crash and leak, and killed grading processes: all other responses are graded.

Run as `test_grading.py sleep|spin PID_FILE`, this file is a process that is killed while its verifiers hang.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

import midflight
import obedient_environment
from midflight.actor import grading_pool
from midflight.actor.grading_pool import GradingPool, MakeEnvironment
from midflight.errors import RolloutError
from midflight.types import Grade, GradedResponse, Problem, RolloutId
from obedient_environment import ObedientEnvironment, ObedientGroups, ObedientTurns

pytestmark = pytest.mark.slow  # every test starts processes

TIMEOUT_S = 60.0
PATIENCE_S = 2.0  # timeout of pools with hung verifiers; long enough for the others on a busy machine
PROBLEM = Problem("0", "0", "0")
TOO_LONG = f"the verifier took longer than task.grading_timeout_s = {PATIENCE_S:g}"


def pool_with(num_processes: int = 1, timeout_s: float = TIMEOUT_S) -> GradingPool:
    return GradingPool(ObedientEnvironment, num_processes, timeout_s)


def submit(pool: GradingPool, responses: list[str]) -> None:
    for index, response in enumerate(responses):
        pool.submit(RolloutId(index), PROBLEM, [response])


def all_results(pool: GradingPool) -> list[GradedResponse]:
    results: list[GradedResponse] = []
    while pool.num_pending:
        new = pool.results(TIMEOUT_S)
        assert new, "no result arrived"
        results += new
    ids = [result.rollout_id for result in results]
    assert len(set(ids)) == len(ids)
    return sorted(results, key=lambda result: result.rollout_id)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "timeout"
        time.sleep(0.01)


def pids_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("hang", ["sleep", "spin", "close_everything"])
def test_a_hung_verifier_fails_only_its_own_response(hang: str) -> None:
    with pool_with(timeout_s=PATIENCE_S) as pool:
        submit(pool, ["reward 1", hang, "reward 2", "reward 3"])
        results = all_results(pool)
        assert [result.grade for result in results] == [Grade(1.0), None, Grade(2.0), Grade(3.0)]
        assert results[1].failure == TOO_LONG


@pytest.mark.parametrize(
    ("crash", "how"), [("kill", "signal 9"), ("end 0", "code 0"), ("end 7", "code 7")], ids=lambda text: text
)
def test_a_verifier_that_kills_its_process_fails_after_two_attempts(crash: str, how: str) -> None:
    with pool_with() as pool:
        submit(pool, ["reward 1", crash, "reward 2", crash, "reward 3"])
        results = all_results(pool)
        assert [result.grade for result in results] == [Grade(1.0), None, Grade(2.0), None, Grade(3.0)]
        assert {results[1].failure, results[3].failure} == {f"the verifier ended its process ({how})"}


def test_an_idle_killed_grader_costs_no_response() -> None:
    with pool_with() as pool:
        for _ in range(3):
            submit(pool, ["pid"])
            (result,) = all_results(pool)
            assert result.grade
            os.kill(int(result.grade.components["pid"]), signal.SIGKILL)
            submit(pool, [f"reward {index}" for index in range(100)])
            assert [result.grade for result in all_results(pool)] == [Grade(float(index)) for index in range(100)]


def test_a_busy_killed_grader_costs_no_response(tmp_path: Path) -> None:
    """The first attempt hangs and is killed; the second attempt finds the file and succeeds."""
    with pool_with() as pool:
        submit(pool, [f"sleep_once {tmp_path / 'pid'}", "reward 2"])
        while not pids_in(tmp_path / "pid"):
            assert pool.results(0.01) == []
        os.kill(pids_in(tmp_path / "pid")[0], signal.SIGKILL)
        assert [result.grade for result in all_results(pool)] == [Grade(1.0), Grade(2.0)]


def test_a_grader_killed_before_it_is_ready_is_restarted(tmp_path: Path) -> None:
    make_environment = functools.partial(ObedientEnvironment, hang_unless=str(tmp_path / "pid"))
    with GradingPool(make_environment, 1, TIMEOUT_S) as pool:
        submit(pool, ["reward 1"])
        wait_for(lambda: bool(pids_in(tmp_path / "pid")))
        os.kill(pids_in(tmp_path / "pid")[0], signal.SIGKILL)
        assert [result.grade for result in all_results(pool)] == [Grade(1.0)]


def test_an_environment_that_raises_at_start_ends_the_run() -> None:
    with (
        GradingPool(functools.partial(ObedientEnvironment, error="no data set"), 2, TIMEOUT_S) as pool,
        pytest.raises(RolloutError, match="a grading process cannot make the environment: ValueError: no da"),
    ):
        pool.wait_until_ready(TIMEOUT_S)


def test_an_environment_that_exits_at_start_ends_the_run() -> None:
    with (
        GradingPool(functools.partial(os._exit, 5), 1, TIMEOUT_S) as pool,
        pytest.raises(RolloutError, match=r"ended before it was ready \(code 5\)"),
    ):
        pool.wait_until_ready(TIMEOUT_S)


def test_an_environment_that_hangs_at_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading_pool, "_START_TIMEOUT_S", 1.0)
    with (
        GradingPool(cast(MakeEnvironment, functools.partial(time.sleep, 1000)), 1, TIMEOUT_S) as pool,
        pytest.raises(RolloutError, match="took longer than 1 s to make the environment"),
    ):
        pool.wait_until_ready(TIMEOUT_S)


def test_results_are_kept_while_processes_start() -> None:
    with pool_with(num_processes=2) as pool:
        assert not pool.wait_until_ready(0.0)
        submit(pool, ["reward 1"])
        assert pool.wait_until_ready(TIMEOUT_S)
        assert [result.grade for result in all_results(pool)] == [Grade(1.0)]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_an_unbroken_series_of_timeouts_ends_the_run(num_processes: int) -> None:
    timeout_s = 0.1
    with pool_with(num_processes, timeout_s) as pool:
        submit(pool, ["sleep"] * 30)
        with pytest.raises(RolloutError, match=r"took longer than task.grading_timeout_s = 0.1, 8 times in a row"):
            all_results(pool)
        assert pool.num_pending > 30 - 8


def test_a_group_has_the_timeout_of_each_member() -> None:
    """A hung group fails as a whole, after its own time; the groups before and after it do not."""
    with GradingPool(ObedientGroups, 1, timeout_s=PATIENCE_S / 3) as pool:
        assert pool.wait_until_ready(TIMEOUT_S)
        for first, responses in [(0, ["reward 1"]), (1, ["reward 1", "sleep", "reward 1"]), (4, ["reward 1"] * 2)]:
            pool.submit_group([RolloutId(first + index) for index in range(len(responses))], PROBLEM, responses)
        results = all_results(pool)
    assert [answer.grade for answer in results] == [Grade(1.0), *[None] * 3, *[Grade(1.0)] * 2]
    assert results[2].failure.endswith(f"task.grading_timeout_s = {PATIENCE_S / 3:g} for each of 3 responses")


def test_a_grade_resets_the_count_of_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading_pool, "_MAX_TIMEOUTS_IN_A_ROW", 3)
    with pool_with(timeout_s=0.5) as pool:
        submit(pool, ["sleep", "sleep", "reward 1"] * 2)
        assert [bool(result.grade) for result in all_results(pool)] == [False, False, True] * 2


def test_all_processes_are_used(tmp_path: Path) -> None:
    """Two hung verifiers occupy two processes; the third process grades."""
    with pool_with(num_processes=3, timeout_s=PATIENCE_S) as pool:
        assert pool.wait_until_ready(TIMEOUT_S)
        submit(pool, [f"sleep {tmp_path / 'pids'}", f"spin {tmp_path / 'pids'}", "pid"])
        results = all_results(pool)
        assert [result.failure for result in results] == [TOO_LONG, TOO_LONG, ""]
        assert results[2].grade
        assert len({*pids_in(tmp_path / "pids"), results[2].grade.components["pid"]}) == 3


def test_an_episode_survives_its_process() -> None:
    with GradingPool(ObedientTurns, 1, timeout_s=TIMEOUT_S) as pool:
        pool.submit(RolloutId(0), PROBLEM, ["say a"])
        assert [result.text for result in all_results(pool)] == ["a"]
        pool.submit(RolloutId(1), PROBLEM, ["kill"])
        assert [result.grade for result in all_results(pool)] == [None]
        pool.submit(RolloutId(0), PROBLEM, ["say a", "count"])
        assert [result.grade for result in all_results(pool)] == [Grade(2.0)]


def test_submit_never_blocks() -> None:
    """Submit a gigabyte of work to hung processes, which no pipe could hold."""
    with pool_with(num_processes=2, timeout_s=PATIENCE_S) as pool:
        submit(pool, ["spin", "spin"])
        response = "length " + "x" * 100_000
        for index in range(10_000):
            pool.submit(RolloutId(2 + index), PROBLEM, [response])
            if index % 1000 == 0:
                pool.results()
        assert pool.num_pending > 9_000


def test_a_stopped_grader_is_replaced() -> None:
    with pool_with(timeout_s=PATIENCE_S) as pool:
        submit(pool, ["pid"])
        (result,) = all_results(pool)
        assert result.grade
        os.kill(int(result.grade.components["pid"]), signal.SIGSTOP)
        submit(pool, ["length " + "x" * 10**7, "reward 1"])
        assert [result.failure for result in all_results(pool)] == [TOO_LONG, ""]


def test_child_processes_end_with_a_killed_verifier(tmp_path: Path) -> None:
    with pool_with(timeout_s=PATIENCE_S) as pool:
        submit(pool, [f"leave_a_child {tmp_path / 'pid'}"])
        assert [result.failure for result in all_results(pool)] == [TOO_LONG]
        (child,) = pids_in(tmp_path / "pid")
        wait_for(lambda: not is_running(child))


def test_a_closed_pool_leaves_no_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    with GradingPool(functools.partial(ObedientEnvironment, pid_file=str(pid_file)), 2, TIMEOUT_S) as pool:
        pool.wait_until_ready(TIMEOUT_S)
        submit(pool, ["sleep", "spin"])
        pool.results()
        assert all(is_running(pid) for pid in pids_in(pid_file))
    assert len(pids_in(pid_file)) == 2
    assert not any(is_running(pid) for pid in pids_in(pid_file))


@contextmanager
def owner_of_a_pool(hang: str, pid_file: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    packages = Path(midflight.__file__).parents[1], Path(obedient_environment.__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages))}
    with subprocess.Popen([sys.executable, __file__, hang, str(pid_file), *arguments], env=environment) as owner:
        try:
            yield owner
        finally:
            owner.kill()


@pytest.mark.parametrize("hang", ["sleep", "spin", "leave_a_child"])
def test_hung_verifiers_end_with_a_killed_run(tmp_path: Path, hang: str) -> None:
    pid_file = tmp_path / "pids"
    with owner_of_a_pool(hang, pid_file) as owner:
        wait_for(lambda: len(pids_in(pid_file)) == 2)
        pids = pids_in(pid_file)
        assert all(is_running(pid) for pid in pids)
        owner.kill()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_program_with_an_unclosed_pool_ends(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    with owner_of_a_pool("sleep", pid_file, "and end") as owner:
        assert owner.wait(TIMEOUT_S) == 0
    assert not any(is_running(pid) for pid in pids_in(pid_file))


def own_a_pool(hang: str, pid_file: str, then: str = "wait") -> None:
    pool = pool_with(num_processes=2)
    submit(pool, [f"{hang} {pid_file}"] * 2)
    while then == "wait" or len(pids_in(Path(pid_file))) < 2:
        pool.results(0.01)


if __name__ == "__main__":
    own_a_pool(*sys.argv[1:])
