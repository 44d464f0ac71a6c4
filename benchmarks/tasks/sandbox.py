"""Benchmark of the sandbox: attacks graded beside right answers, and executions per second."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tasks.attacks import SECRET, attacks
from midflight.actor.grading_pool import GradingPool
from midflight.envs.rewards.code import Code
from midflight.envs.sandbox.sandbox import protections
from midflight.types import Grade, GradedResponse, Problem, RolloutId

RIGHT = "def double(x):\n    return 2 * x"
PROBLEM = Problem("double", "Write double(x).", "assert double(2) == 4\nassert double(-1) == -2")
_ATTACK_TIMEOUT_S = 1.0
_GRADING_TIMEOUT_S = 30.0
_NUM_EXECUTIONS = 200
_NUM_STARTS = 20
_LEAST_EXECUTIONS_PER_S = 20.0
_MAX_S_PER_ATTACK = 5.0


class DoubleTask:
    """One problem of code, for a grading process."""

    def __init__(self) -> None:
        self._reward = Code(timeout_s=_ATTACK_TIMEOUT_S)

    def problem(self, index: int) -> Problem:
        return PROBLEM

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return []

    def grade(self, problem: Problem, response: str) -> Grade:
        if response == "pid":  # the process that attacks must not harm
            return Grade(float(os.getpid()))
        return self._reward(problem, response)


def measure(say: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the outcome of every attack and the speed; each attack must cost its own rollout only."""
    rows: list[dict[str, Any]] = [{"name": "protections", **protections()}]
    os.environ["MIDFLIGHT_BENCHMARK_SECRET"] = SECRET
    try:
        with tempfile.TemporaryDirectory() as directory:
            outcomes = run_attacks(Path(directory), say)
    finally:
        del os.environ["MIDFLIGHT_BENCHMARK_SECRET"]
    targets = [
        {"name": f"sandbox, {row['attack']}: harm done", "value": row["harm"], "limit": 0, "holds": row["harm"] == 0}
        for row in outcomes
    ]
    say("executions per second")
    with GradingPool(DoubleTask, 1, _GRADING_TIMEOUT_S) as pool:
        _answers(pool, [RIGHT])
        started_s = time.perf_counter()
        _answers(pool, [RIGHT] * _NUM_EXECUTIONS)
        rate = _NUM_EXECUTIONS / (time.perf_counter() - started_s)
    slowest_s = max(row["seconds"] for row in outcomes)
    rows += [*outcomes, {"name": "executions per second", "sandbox": rate, "new_interpreter": _starts_per_s()}]
    targets += [
        _at_least("sandbox, executions per second", rate, _LEAST_EXECUTIONS_PER_S),
        {
            "name": "sandbox, slowest attack with a time limit of 1 s, seconds",
            "value": slowest_s,
            "limit": _MAX_S_PER_ATTACK,
            "holds": slowest_s <= _MAX_S_PER_ATTACK,
        },
    ]
    return rows, targets


def run_attacks(directory: Path, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Grade every attack in one grading process, each before a right response; return a row for each attack.

    `harm` counts: a reward, a failed rollout, a right response not rewarded, a grading process replaced, a file
    written, a connection made, a process left.
    """
    secret = directory / "secret"
    secret.write_text(SECRET)
    rows = []
    with socket.create_server(("127.0.0.1", 0)) as server, GradingPool(DoubleTask, 1, _GRADING_TIMEOUT_S) as pool:
        connections = _count_connections(server)
        (pid,) = (int(answer.grade.reward) for answer in _answers(pool, ["pid"]) if answer.grade)
        _answers(pool, [RIGHT])
        processes = _descendants(pid)
        for name, code in attacks(directory, server.getsockname()[1], pid).items():
            say(name)
            started_s = time.perf_counter()
            (attack,) = _answers(pool, [f"```python\n{code}\n```"])
            seconds = time.perf_counter() - started_s
            right, (same,) = _answers(pool, [RIGHT]), _answers(pool, ["pid"])
            harms = {
                "reward": attack.grade is None or attack.grade.reward != 0,
                "failure": bool(attack.failure),
                "next response": [answer.grade.reward for answer in right if answer.grade] != [1.0],
                "grading process": same.grade is None or same.grade.reward != pid,
                "file": [path.name for path in directory.iterdir()] != ["secret"] or secret.read_text() != SECRET,
                "mode": not os.access(directory, os.R_OK) or directory.stat().st_mode & 0o700 != 0o700,
                "connection": bool(connections),
                "processes": _descendants(pid) != processes,
            }
            harmed = [what for what, harm in harms.items() if harm]
            rows.append({"attack": name, "harm": len(harmed), "harmed": ", ".join(harmed), "seconds": seconds})
    return rows


def _count_connections(server: socket.socket) -> list[object]:
    """Accept connections in the background; the list grows with each."""
    connections: list[object] = []

    def accept() -> None:
        try:
            while True:
                connection, address = server.accept()
                connections.append(address)
                connection.close()
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    return connections


def _answers(pool: GradingPool, responses: list[str]) -> list[GradedResponse]:
    for index, response in enumerate(responses):
        pool.submit(RolloutId(index), PROBLEM, [response])
    answers: list[GradedResponse] = []
    while pool.num_pending:
        answers += pool.results(_GRADING_TIMEOUT_S)
    return answers


def _descendants(pid: int) -> set[int]:
    """Process ids of all children of a process, and of theirs."""
    found: set[int] = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found |= {int(child), *_descendants(int(child))}
    return found


def _starts_per_s() -> float:
    """Interpreters started per second without any sandbox, for comparison."""
    started_s = time.perf_counter()
    for _ in range(_NUM_STARTS):
        subprocess.run([sys.executable, "-I", "-S", "-c", RIGHT], check=True)
    return _NUM_STARTS / (time.perf_counter() - started_s)


def _at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": limit, "holds": value >= limit}
