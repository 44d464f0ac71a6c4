"""Runs whose processes are killed at random: no group is lost, trained on twice, or restarted.

Every 1 to 5 s one process gets SIGKILL, or sometimes SIGSTOP until the next kill. A killed supervisor is followed by
`--resume`, a killed engine by another engine. `make soak` kills many more processes than the tests.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from benchmarks.redis_server import RedisServer

from faults.runs import (
    RECIPE,
    SETTINGS,
    Run,
    batches_of,
    check_accounts,
    check_saved_rollouts_continued,
    is_running,
    long_sums,
    num_lines,
    resume,
    saved_partials,
    serving,
    training,
    waiting_of,
    writes_to,
)
from midflight.config.run_directory import RunDirectory
from soak import SOAK

NUM_KILLS = 4 * SOAK
STOP_PROBABILITY = 0.2
MARK = "MIDFLIGHT_RUN_TO_KILL"  # in the environment of every process that may be killed
PATIENT = ("supervisor.backoff_s=0.02", "supervisor.max_restarts=1000", "task.grading_timeout_s=60")
CASES = {
    "april": (
        *("schedule.type=april", "schedule.over_sampling=2"),
        *("loss.kl_coefficient=0.01", "preprocess.num_workers=2"),
    ),
    "fsdp": (
        *("schedule.type=pipeline", "schedule.num_in_flight=16", "streams.type=redis"),
        *("trainer.type=fsdp", "trainer.num_ranks=2"),
    ),
    "http": ("schedule.type=bounded", "schedule.max_lag=2", "engine.type=http", "weights.timeout_s=5"),
}
COMMANDS = {"resource_tracker": "resource tracker", "spawn_main": "grader", "\0serve\0": "engine"}
NUM_ENGINES = {"http": 2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180 + 40 * NUM_KILLS),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]


@dataclass
class Victims:
    """A run, its engines, and all their processes by role."""

    directory: RunDirectory
    stack: ExitStack
    num_engines: int
    run: Run
    engines: list[subprocess.Popen[str]] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)  # groups of every batch seen so far

    def by_role(self) -> dict[str, list[int]]:
        found = defaultdict(list)
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.directory.path}\0".encode() in (path / "environ").read_bytes():
                    found[self._role(int(path.name))].append(int(path.name))
        return found

    def keep_going(self) -> None:
        """Restart the supervisor and the engines, which no other process restarts."""
        if self.run.process.poll() is not None:
            assert self.run.process.returncode == -signal.SIGKILL, "".join(self.run.said)
            print("fault: the run is resumed", flush=True)
            arguments = (self.directory.path, "--resume", "trainer.max_steps=100000")
            self.run = Run(self.directory, self.stack.enter_context(training(*arguments)))
        self.engines = [engine for engine in self.engines if engine.poll() is None]
        while len(self.engines) < self.num_engines and self.directory.config.exists():
            self.engines.append(self.stack.enter_context(serving(self.directory)))

    def check_batches(self) -> None:
        """Check that batches handed over earlier are unchanged. Called while no process is running."""
        batches: dict[int, list[int]] = {
            offset: list(batch.group_ids) for offset, batch in batches_of(self.directory).items()
        }
        for index, chosen in waiting_of(self.directory).items():
            batches[index] = [group.group_id for group in chosen.groups]
        for offset in batches.keys() & self.trained.keys():
            assert batches[offset] == self.trained[offset]
        self.trained |= batches

    def wait_for_orphans(self) -> None:
        orphans = [pid for role, pids in self.by_role().items() if role != "engine" for pid in pids]
        deadline_s = time.monotonic() + 60
        while any(is_running(pid) for pid in orphans):
            assert time.monotonic() < deadline_s, f"processes survive their supervisor: {self.by_role()}"
            time.sleep(0.05)

    def _role(self, pid: int) -> str:
        command = Path(f"/proc/{pid}/cmdline").read_text()
        for text, role in COMMANDS.items():
            if text in command:
                return role
        if "forkserver" not in command:
            return "supervisor"
        logs = [path.stem for path in self.directory.log("").parent.glob("*.log") if writes_to(pid, path.name)]
        return logs[0] if logs else "fork server"


@contextlib.contextmanager
def victims_of(path: Path, case: str, *task: str) -> Iterator[Victims]:
    directory = RunDirectory(path)
    with ExitStack() as stack:
        settings = (f"run.directory={path}", *SETTINGS, *PATIENT, *CASES[case], *task)
        run = Run(directory, stack.enter_context(training(RECIPE, *settings)))
        victims = Victims(directory, stack, NUM_ENGINES.get(case, 0), run)
        run.wait_until(directory.config.exists)
        victims.keep_going()
        try:
            yield victims
        finally:
            for pid in [pid for pids in victims.by_role().values() for pid in pids]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "case", ["april", *(pytest.param(case, marks=pytest.mark.faults) for case in ("fsdp", "http"))]
)
def test_random_kills_lose_and_repeat_no_group(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(f"{NUM_KILLS} kills of {case}")
    task, path = long_sums(tmp_path, monkeypatch), tmp_path / "run"
    with ExitStack() as stack:
        if case == "fsdp":
            redis = tmp_path / "redis"
            redis.mkdir()
            monkeypatch.setenv("MIDFLIGHT_REDIS_URL", stack.enter_context(RedisServer(redis)).url)
        monkeypatch.setenv(MARK, str(path))
        victims = stack.enter_context(victims_of(path, case, *task))
        victims.run.wait_for_steps(2)
        print(f"kills: {dict(kill_at_random(victims, chance))}", flush=True)
        victims.keep_going()
        victims.run.wait_for_steps(2)
        victims.run.end()
        victims.check_batches()
        saved, num_steps = saved_partials(victims.directory), num_lines(victims.directory) + 12
        summary, _ = resume(victims.directory, num_steps)
        assert summary["steps"] == num_steps
        check_accounts(victims.directory, summary)
        victims.check_batches()
        if saved:
            check_saved_rollouts_continued(saved, batches_of(victims.directory))
        victims.wait_for_orphans()


def kill_at_random(victims: Victims, chance: random.Random) -> Counter[str]:
    killed: Counter[str] = Counter()
    stopped: int | None = None
    while killed.total() < NUM_KILLS:
        time.sleep(chance.uniform(1, 5))  # not a wait for anything: a process may die at any moment
        if stopped is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        victims.keep_going()
        found = victims.by_role()
        if not {"trainer", "rollout"} & found.keys() and chance.random() < 0.8:
            continue  # on a busy machine, all kills would otherwise hit runs that are still starting
        role = chance.choice(sorted(found))
        stops = chance.random() < STOP_PROBABILITY
        victim = chance.choice(sorted(found[role]))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if stops else signal.SIGKILL)
        print(f"fault: SIG{'STOP' if stops else 'KILL'} to {role}, {num_lines(victims.directory)} steps", flush=True)
        stopped = victim if stops else None
        killed[role] += not stops
        if role == "supervisor" and not stops:
            victims.run.process.wait()
            if chance.random() < 0.5:  # otherwise the next supervisor meets the old workers
                victims.wait_for_orphans()
                victims.check_batches()
    if stopped is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    return killed
