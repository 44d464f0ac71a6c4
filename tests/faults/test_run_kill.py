"""Whole runs whose processes are killed at random moments and that go on: no group is lost or trained on twice.

$MIDFLIGHT_KILL_RUNS is how many runs, without it two; `make kills` does more of them than the tests.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midflight
from midflight.actor.partials import PartialBuffer
from midflight.config import load_recipe
from midflight.launch.run_directory import RunDirectory
from midflight.launch.streams import open_batches, open_groups, open_handed_over
from midflight.launch.workers import actor_checkpoint
from midflight.metrics.jsonl import read_metrics
from midflight.types import ChosenBatch, GeneratedTokens, Rollout, RolloutStatus, TrainingBatch

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu_demo.toml"
TIMEOUT_S = 120.0
BATCH_SIZE, GROUP_SIZE = 16, 4
SETTINGS = (
    f"batch.batch_size={BATCH_SIZE}",
    f"batch.group_size={GROUP_SIZE}",
    "eval.num_problems=0",
    "engine.threads=1",  # more of them than free cores wait for each other, for seconds a step
    "trainer.threads=1",
    "trainer.checkpoint_every=3",
    "trainer.keep_checkpoints=1000",
    "trainer.max_steps=100000",
)
SCHEDULES: list[tuple[str, ...]] = [
    ("schedule.type=pipeline", "schedule.num_in_flight=16"),
    ("schedule.type=april", "schedule.over_sampling=2"),
    ("schedule.type=bounded", "schedule.max_lag=2"),
    ("schedule.type=conventional", "schedule.steps_per_rl_step=4"),
]
VICTIMS = ["trainer", "rollout", "grader", "supervisor", "preprocess"]
# Each victim with each schedule in twenty runs; by default one whose trainer and one whose preprocessing dies.
NUM_RUNS = os.environ.get("MIDFLIGHT_KILL_RUNS")
RUNS = range(int(NUM_RUNS)) if NUM_RUNS else (0, VICTIMS.index("preprocess"))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "midflight", "train", *map(str, arguments)]


@contextmanager
def training(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def resume(run: RunDirectory, num_steps: int) -> tuple[dict[str, Any], str]:
    """The summary, and what it said."""
    arguments = command(run.path, "--resume", f"trainer.max_steps={num_steps}", "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def wait_for(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert process.poll() is None, f"the run ended early: {process.communicate()[1]}"
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.005)


def num_lines(run: RunDirectory) -> int:
    return run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def pid_of(role: str, supervisor: int) -> int:
    """The log says which process writes it; the processes that grade are started by the one of the rollouts."""
    if role == "supervisor":
        return supervisor
    if role == "grader":
        return children(pid_of("rollout", supervisor))[0]
    for child in children(supervisor):
        if any(descriptor.resolve().name == f"{role}.log" for descriptor in Path(f"/proc/{child}/fd").iterdir()):
            return child
    pytest.fail(f"no {role} process")


def batches_of(run: RunDirectory) -> dict[int, TrainingBatch]:
    """Those that are still in the stream, by offset; the trainer keeps what it could need again."""
    with closing(sqlite3.connect(run.batches)) as database:
        (first,) = database.execute("SELECT min(offset) FROM records").fetchone()
    if first is None:
        return {}
    with closing(open_batches(run, load_recipe(run.config))) as batches:
        return dict(enumerate(batches.read(first, 10**6, timeout_s=0), first))


def waiting_of(run: RunDirectory) -> dict[int, ChosenBatch]:
    """Those that were handed over and not preprocessed, by index."""
    if not run.groups.exists():
        return {}
    recipe = load_recipe(run.config)
    with closing(open_batches(run, recipe)) as batches, closing(open_groups(run, recipe)) as groups:
        first = batches.next_offset()
        return dict(enumerate(groups.read(first, 10**6, timeout_s=0), first))


def check_counts(summary: dict[str, Any]) -> None:
    groups = summary["groups"]
    assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))


def check_books(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Every group that was started is in one batch, or open; so far as batches were trimmed, their number is right."""
    check_counts(summary)
    groups = summary["groups"]
    assert groups["failed"] == groups["dropped"] == 0
    assert groups["trained"] == summary["steps"] * BATCH_SIZE // GROUP_SIZE
    assert summary["samples"] == summary["steps"] * BATCH_SIZE
    assert [line["version"] for line in read_metrics(run.metrics)] == list(range(1, summary["steps"] + 1))
    recipe = load_recipe(run.config)
    with closing(open_handed_over(run, recipe)) as stream, closing(PartialBuffer(run.partials)) as partials:
        checkpoint = actor_checkpoint(partials, stream)
    assert checkpoint
    batches, waiting = batches_of(run), waiting_of(run)
    first = min(batches)
    assert [*batches, *waiting] == list(range(first, checkpoint.state.num_batches))
    in_batches = [group_id for batch in batches.values() for group_id in batch.group_ids]
    in_batches += [group.group_id for chosen in waiting.values() for group in chosen.groups]
    known = in_batches + checkpoint.state.open_group_ids
    assert len(set(known)) == len(known), "a group is in two batches, or in one and still open"
    assert set(known) <= set(range(checkpoint.state.next_group_id))
    assert checkpoint.state.next_group_id - len(known) == first * BATCH_SIZE // GROUP_SIZE
    assert {rollout.group_id for rollout in checkpoint.rollouts} <= set(checkpoint.state.open_group_ids)
    for microbatch in (microbatch for batch in batches.values() for microbatch in batch.microbatches[0]):
        ends = np.cumsum(microbatch.sequence_lengths)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            own = slice(start, end)
            versions = microbatch.weight_versions[own][microbatch.loss_mask[own]]
            assert (np.diff(versions) >= 0).all(), "a token follows one of a newer version"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("index", RUNS)
def test_whatever_is_killed_no_group_is_lost_or_trained_twice(tmp_path: Path, index: int) -> None:
    chance = random.Random(f"kills {index}")
    victim, schedule = VICTIMS[index % len(VICTIMS)], SCHEDULES[index % len(SCHEDULES)]
    preprocess = "own" if victim == "preprocess" or chance.random() < 0.5 else "rollout"
    settings = (*SETTINGS, *schedule, f"preprocess.process={preprocess}")
    run = RunDirectory(tmp_path / "run")
    with training(RECIPE, f"run.directory={run.path}", *settings) as process:
        at_step = chance.randint(1, 16)
        wait_for(process, lambda: num_lines(run) >= at_step)
        time.sleep(chance.uniform(0, 0.2))  # waits for nothing: without it all die just after a line was written
        os.kill(pid_of(victim, process.pid), signal.SIGKILL)
        if victim == "grader":
            killed_at = num_lines(run)
            wait_for(process, lambda: num_lines(run) >= killed_at + 8)
            process.send_signal(signal.SIGINT)
        if victim == "supervisor":
            process.wait()
        else:
            _, stderr = process.communicate(timeout=TIMEOUT_S)
    before: dict[int, TrainingBatch] = {}
    handed_over: dict[int, ChosenBatch] = {}
    match victim:
        case "supervisor":
            assert process.returncode == -signal.SIGKILL
        case "grader":
            assert process.returncode == 130, stderr
            check_books(run, json.loads(run.summary.read_text()))
        case _:
            assert process.returncode == 1, stderr
            assert f"the {victim} process was killed by signal 9" in stderr
            check_counts(json.loads(run.summary.read_text()))
            before = batches_of(run)
            handed_over = waiting_of(run)
    num_steps = num_lines(run) + 12
    summary, _ = resume(run, num_steps)
    assert summary["steps"] == num_steps
    check_books(run, summary)
    after = batches_of(run)
    for offset in before.keys() & after.keys():
        assert after[offset].group_ids == before[offset].group_ids
    for offset in handed_over.keys() & after.keys():
        assert after[offset].group_ids == [group.group_id for group in handed_over[offset].groups]


@pytest.mark.timeout(400)
def test_groups_that_wait_when_preprocessing_is_killed_are_trained_on_later(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    settings = (*SETTINGS, "schedule.type=bounded", "schedule.max_lag=2", "preprocess.process=own")
    with training(RECIPE, f"run.directory={run.path}", *settings) as process:
        wait_for(process, lambda: num_lines(run) >= 4)
        pid = pid_of("preprocess", process.pid)
        os.kill(pid, signal.SIGSTOP)
        wait_for(process, lambda: len(waiting_of(run)) >= 2)
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert "the preprocess process was killed by signal 9" in stderr
    waiting = waiting_of(run)
    interrupted = json.loads(run.summary.read_text())
    check_books(run, interrupted)
    assert interrupted["groups"]["unfinished"] >= len(waiting) * BATCH_SIZE // GROUP_SIZE
    summary, _ = resume(run, max(waiting) + 3)
    check_books(run, summary)
    batches = batches_of(run)
    for index, chosen in waiting.items():
        assert batches[index].group_ids == [group.group_id for group in chosen.groups]


LONG_SUMS = """
from midflight.envs.chain_sums import ChainSums
from midflight.types import Grade

class LongSums(ChainSums):
    def grade(self, problem, response):
        return Grade(len(response) + 0.01 * response.count("1"))  # hardly two alike: all of them are trained on
"""


@pytest.mark.timeout(400)
def test_the_tokens_of_a_killed_rollout_process_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long_sums.py").write_text(LONG_SUMS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(midflight.__file__).parents[1])]))
    run = RunDirectory(tmp_path / "run")
    task = ("task.type=long_sums:LongSums", "task.options.min_terms=12", "schedule.num_in_flight=32")
    with training(RECIPE, f"run.directory={run.path}", *SETTINGS, *task) as process:
        wait_for(process, lambda: num_lines(run) >= 4 and len(saved_partials(run)) >= 8)
        os.kill(pid_of("rollout", process.pid), signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
    saved = saved_partials(run)
    assert saved, "something was in flight, and nothing was kept of it"
    for rollout in saved:
        assert len(rollout.generated.weight_versions) == len(rollout.generated.logprobs) == len(rollout.generated)
        assert rollout.generated.weight_versions.min() >= 0
    num_before = len(batches_of(run)) and max(batches_of(run)) + 1
    summary, _ = resume(run, num_lines(run) + 12)
    check_books(run, summary)
    later = {offset: batch for offset, batch in batches_of(run).items() if offset >= num_before}
    trained = {group_id: batch for batch in later.values() for group_id in batch.group_ids}
    went_on = [rollout for rollout in saved if rollout.group_id in trained]
    assert went_on
    found = [any(starts_with(each, rollout.generated) for each in sequences(trained[rollout.group_id]))
             for rollout in went_on]  # fmt: skip
    # One whose reward is just its group's mean is left out.
    assert sum(found) >= max(1, len(went_on) - 2), "rollouts were generated again from their start"
    assert all(trained[rollout.group_id].metrics["carried_token_fraction"] > 0 for rollout in went_on)


def saved_partials(run: RunDirectory) -> list[Rollout]:
    """Rollouts that are kept in the middle, with enough tokens to tell them apart."""
    if not run.partials.exists():
        return []
    with closing(PartialBuffer(run.partials)) as partials:
        checkpoint = partials.load()
    rollouts = checkpoint.rollouts if checkpoint else []
    return [each for each in rollouts if each.status is RolloutStatus.PARTIAL and len(each.generated) >= 8]


def sequences(batch: TrainingBatch) -> Iterator[GeneratedTokens]:
    """The sampled tokens of every sequence in a batch."""
    for microbatch in batch.microbatches[0]:
        ends = np.cumsum(microbatch.sequence_lengths).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            sampled = start + np.flatnonzero(microbatch.loss_mask[start:end])
            yield GeneratedTokens(
                microbatch.token_ids[sampled],
                microbatch.behavior_logprobs[sampled],
                microbatch.weight_versions[sampled],
            )


def starts_with(whole: GeneratedTokens, part: GeneratedTokens) -> bool:
    start = whole.part(0, len(part))
    return all(
        np.array_equal(getattr(start, name), getattr(part, name))
        for name in ("token_ids", "logprobs", "weight_versions")
    )


def shared_weights() -> set[Path]:
    return set(Path("/dev/shm").glob("midflight-*"))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(400)
def test_workers_without_a_supervisor_clean_up_and_nobody_runs_beside_them(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with training(RECIPE, f"run.directory={run.path}", *SETTINGS, *SCHEDULES[0]) as process:
        wait_for(process, lambda: num_lines(run) >= 2)
        pids = {role: pid_of(role, process.pid) for role in ("trainer", "rollout", "grader")}
        weights = {each for each in shared_weights() if is_mapped(each, pids["trainer"])}
        assert len(weights) == 1
        # The rollout process cannot find out, as long as it is stopped, that it is on its own.
        os.kill(pids["rollout"], signal.SIGSTOP)
        process.kill()
        process.wait()
    with training(run.path, "--resume", f"trainer.max_steps={num_lines(run) + 12}", "--json") as process:
        assert process.stderr
        assert "waiting for the processes of an earlier run" in process.stderr.readline()
        assert is_running(pids["rollout"])
        os.kill(pids["rollout"], signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, stderr
    assert not any(is_running(pid) for pid in pids.values())
    assert not weights & shared_weights()
    check_books(run, json.loads(stdout))


def is_mapped(directory: Path, pid: int) -> bool:
    return str(directory) in Path(f"/proc/{pid}/maps").read_text()
