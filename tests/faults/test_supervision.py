"""Runs with injected faults that continue: no group is lost or trained on twice, and no process hangs.

Each fault prints a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from benchmarks.redis_server import RedisServer

from faults.runs import (
    SCHEDULES,
    TIMEOUT_S,
    Run,
    batches_of,
    check_accounts,
    descendants,
    find,
    is_running,
    num_lines,
    resume,
    running,
    training,
)
from midflight.config import Recipe, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.launch.build import build_learning_rates, build_trainer
from midflight.launch.objectives import build_objective
from midflight.metrics.jsonl import JsonlWriter, read_metrics
from midflight.run.workers import loop_settings
from midflight.streams.memory import MemoryStream
from midflight.testing.fakes import InProcessWeights
from midflight.tracing.spans import Tracer
from midflight.trainer.checkpoints import load_state, newest_checkpoint
from midflight.trainer.loop import TrainLoop
from midflight.trainer.state import TrainerState
from midflight.trainer.step import TrainStep
from midflight.types import TrainingBatch
from midflight.weights.shared_memory import SharedMemoryReceiver

pytestmark = pytest.mark.slow

QUICK = ("supervisor.backoff_s=0.02", "supervisor.max_restarts=20")
OWN = "preprocess.num_workers=1"


def weights_of(pid: int) -> Path:
    """Return the file through which a process gets its weights."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in lines if line.endswith("/weights"))


def immediately(run: Run, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, 0.2))  # not a wait for anything: spreads the kills over a step


def during_a_checkpoint(run: Run, chance: random.Random) -> None:
    run.wait_until(lambda: any(run.directory.checkpoints.glob(".unfinished-*")))


def during_an_update(run: Run, chance: random.Random) -> None:
    """Wait until the trainer has sent weights, which the engine then copies."""
    receiver = SharedMemoryReceiver(weights_of(run.pid("trainer")))
    before = receiver.newest_version()
    assert before is not None
    run.wait_until(lambda: (receiver.newest_version() or 0) > before)
    receiver.close()


MOMENTS = [immediately, immediately, during_a_checkpoint, during_an_update]


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule[0].partition("=")[2])
def test_a_run_survives_the_death_of_every_process(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    chance = random.Random(f"deaths {schedule[0]}")
    own = schedule[0] in ("schedule.type=pipeline", "schedule.type=conventional")
    roles = ["trainer", "rollout", "grader", "trainer", "rollout", *(["preprocess"] if own else [])]
    settings = (*schedule, *QUICK, "trainer.checkpoint_every=2", *([OWN] if own else []))
    with running(tmp_path / "run", *settings) as run:
        for index in range(20):
            MOMENTS[index % len(MOMENTS)](run, chance)
            victims = [roles[index % len(roles)]]
            if index % 7 == 6:
                victims.append("rollout" if victims != ["rollout"] else "trainer")
            for victim in victims:
                run.hurt(victim)
            run.wait_for_steps(2)
        summary = run.end()
    restarts = summary["restarts"]
    assert isinstance(restarts, dict)
    assert restarts.keys() >= {"trainer", "rollout"}
    assert all(path.name.startswith("step_") for path in run.directory.checkpoints.iterdir())


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_weight_files_survive_their_sender(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    settings = (*SCHEDULES[0], *QUICK, "weights.type=files", f"weights.directory={weights}")
    with running(tmp_path / "run", *settings) as run:
        for _ in range(3):
            newest = weights / "newest"
            before = newest.read_text()
            run.wait_until(lambda: any(weights.glob("*unfinished*")) or newest.read_text() != before)  # noqa: B023
            run.hurt("trainer")
            run.wait_for_steps(3)
            run.hurt("rollout")
            run.wait_for_steps(2)
        run.end()
    assert len(list(weights.glob("*.safetensors"))) == 2


@pytest.mark.timeout(600)
def test_a_hung_process_is_restarted(tmp_path: Path) -> None:
    roles = ["trainer", "rollout", "preprocess", "rollout", "trainer"]
    with running(tmp_path / "run", *SCHEDULES[0], *QUICK, OWN, "supervisor.heartbeat_timeout_s=3") as run:
        for role in roles:
            before = run.num_said(f"the {role} process has hung for 3 s")
            run.hurt(role, signal.SIGSTOP)
            run.wait_until(lambda: run.num_said(f"the {role} process has hung for 3 s") > before)  # noqa: B023
            run.wait_for_steps(2)
        run.end()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_suspended_run_restarts_no_process(tmp_path: Path) -> None:
    with running(tmp_path / "run", *SCHEDULES[0], *QUICK, "supervisor.heartbeat_timeout_s=3") as run:
        everyone = [*descendants(run.process.pid), run.process.pid]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        print("fault: SIGSTOP to all", flush=True)
        time.sleep(5)  # longer than the heartbeat timeout; nobody may be restarted for it
        for pid in reversed(everyone):
            os.kill(pid, signal.SIGCONT)
        run.wait_for_steps(2)
        assert run.end()["restarts"] == {}


def test_a_process_that_always_dies_ends_the_run(tmp_path: Path) -> None:
    with running(tmp_path / "run", *SCHEDULES[0], "supervisor.backoff_s=0.02", "supervisor.max_restarts=2") as run:
        deadline_s = time.monotonic() + TIMEOUT_S
        while run.process.poll() is None and time.monotonic() < deadline_s:
            if rollout := find("rollout", run.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rollout, signal.SIGKILL)
            time.sleep(0.01)
        assert run.process.returncode == 1
    assert "the rollout process was killed by signal 9, 3 times without an optimizer step; its log is" in run.said[-1]
    summary = json.loads(run.directory.summary.read_text())
    check_accounts(run.directory, summary)
    assert summary["restarts"]["rollout"] >= 2


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_checkpoint_damaged_during_the_run_is_skipped(tmp_path: Path) -> None:
    with running(tmp_path / "run", *SCHEDULES[0], *QUICK, "trainer.keep_checkpoints=4") as run:
        for index in range(3):
            run.wait_until(lambda: len(list(run.directory.checkpoints.glob("step_*"))) >= 2)
            os.kill(run.pid("trainer"), signal.SIGSTOP)
            newest = max(run.directory.checkpoints.glob("step_*"), key=lambda path: int(path.name[5:]))
            weights = newest / "model.safetensors"
            os.truncate(weights, weights.stat().st_size * (index + 1) // 4)
            print("fault: torn checkpoint", flush=True)
            run.hurt("trainer")
            run.wait_until(lambda: run.num_said(f"{newest.name} is damaged and not used") == 1)  # noqa: B023
            run.wait_for_steps(4)
        run.end()


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "preprocess", [(), ("preprocess.num_workers=1",), ("loss.kl_coefficient=0.01", "preprocess.num_workers=2")]
)
def test_truncated_stream_logs_lose_no_group(tmp_path: Path, preprocess: tuple[str, ...]) -> None:
    """Simulate a power loss: kill every process at once and truncate the write-ahead logs of SQLite."""
    chance = random.Random(f"cut logs {preprocess}")
    run = RunDirectory(tmp_path / "run")
    settings = (*SCHEDULES[0], *preprocess)
    with running(run.path, *settings) as active:
        active.wait_for_steps(chance.randint(4, 8))
        kill_all(active.process)
    for _ in range(3):
        logs = [log for log in run.batches.parent.glob("*.sqlite-wal") if log.stat().st_size]
        assert logs
        for log in logs:
            os.truncate(log, chance.randint(0, log.stat().st_size))
            print(f"fault: cut {log.name}", flush=True)
        arguments = (str(run.path), "--resume", "trainer.max_steps=100000")
        with training(*arguments) as process:
            active = Run(run, process)
            active.wait_until(lambda: find("trainer", process.pid) is not None)
            active.wait_for_steps(chance.randint(4, 8))
            kill_all(process)
    summary, _ = resume(run, num_lines(run) + 6)
    check_accounts(run, summary)


def kill_all(process: subprocess.Popen[str]) -> None:
    """Stop all processes before killing them, so that none can react and close its files."""
    pids = [process.pid, *descendants(process.pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    process.wait(TIMEOUT_S)
    for pid in pids[1:]:
        while is_running(pid):
            time.sleep(0.01)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_run_waits_for_a_restarting_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "redis"
    data.mkdir()
    with RedisServer(data) as server:
        monkeypatch.setenv("MIDFLIGHT_REDIS_URL", server.url)
        settings = (*SCHEDULES[0], *QUICK, OWN, "streams.type=redis")
        run = RunDirectory(tmp_path / "run")
        with running(run.path, *settings) as active:
            for away_s in (0.0, 0.0, 1.0, 20.0):
                server.kill()
                print(f"fault: Redis is away for {away_s:g} s", flush=True)
                time.sleep(away_s)  # duration of the fault
                server.start()
                active.wait_for_steps(3)
            server.signal(signal.SIGSTOP)
            print("fault: Redis does not answer for 3 s", flush=True)
            time.sleep(3.0)
            server.signal(signal.SIGCONT)
            active.wait_for_steps(3)
            active.process.terminate()
            active.process.wait(TIMEOUT_S)
            assert active.process.returncode == 130, "".join(active.said)
            assert not active.num_said("; restart in ")
        groups = json.loads(run.summary.read_text())["groups"]
    steps = [line["version"] for line in read_metrics(run.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert groups["trained"] == 4 * len(steps)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_killed_trainer_reaches_the_same_weights(tmp_path: Path) -> None:
    """Kill the trainer three times between checkpoints; its weights equal undisturbed training, bit for bit."""
    settings = (*SCHEDULES[0], *QUICK, "trainer.checkpoint_every=12", "trainer.keep_checkpoints=1000")
    batches: dict[int, TrainingBatch] = {}
    with running(tmp_path / "run", *settings) as run:

        def has_first_batches() -> bool:
            """Collect the batches that are trimmed with the first checkpoint."""
            batches.update(batches_of(run.directory))
            return 11 in batches

        run.wait_until(has_first_batches)
        for _ in range(3):
            run.wait_for_steps(16)
            run.hurt("trainer")
        run.wait_for_steps(2)
        assert run.end()["restarts"] == {"trainer": 3}
    batches |= batches_of(run.directory)
    disturbed = newest_checkpoint(run.directory.checkpoints)
    assert disturbed
    undisturbed = train_alone(load_recipe(run.directory.config), batches, load_state(disturbed).version, tmp_path)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (disturbed / name).read_bytes() == (undisturbed / name).read_bytes()


def train_alone(recipe: Recipe, batches: dict[int, TrainingBatch], num_steps: int, directory: Path) -> Path:
    """Train on these batches in this process and return the final checkpoint."""
    stream: MemoryStream[TrainingBatch] = MemoryStream(capacity=len(batches))
    for index in range(num_steps):
        stream.append(batches[index])
    trainer = recipe.trainer.model_copy(update={"max_steps": num_steps, "checkpoint_every": num_steps})
    recipe = recipe.model_copy(update={"trainer": trainer})
    backend = build_trainer(recipe, InProcessWeights())
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        backend.init(rank=0)
        with JsonlWriter(directory / "metrics.jsonl") as metrics:
            step = TrainStep(backend, build_objective(recipe), build_learning_rates(recipe))
            settings = loop_settings(recipe, RunDirectory(directory))
            loop = TrainLoop(settings, step, stream, TrainerState(), Tracer(None, "test"), metrics)
            loop.run(lambda: False)
    finally:
        torch.set_num_threads(num_threads)
    checkpoint = newest_checkpoint(directory / "checkpoints")
    assert checkpoint
    return checkpoint
