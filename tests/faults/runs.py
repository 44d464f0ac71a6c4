"""Training runs of the tests: started, looked into while they run, and checked for every group afterwards."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from midflight.config import load_recipe
from midflight.launch.resuming import actor_checkpoint
from midflight.launch.run_directory import RunDirectory
from midflight.launch.streams import open_batches, open_groups
from midflight.metrics.jsonl import read_metrics
from midflight.types import ChosenBatch, TrainingBatch

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
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def writes_to(pid: int, name: str) -> bool:
    try:
        return any(descriptor.resolve().name == name for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False


def find(role: str, supervisor: int) -> int | None:
    """The process of a role, if there is one now: its log says which. Those that grade are started by the rollouts'."""
    if role == "supervisor":
        return supervisor
    if role == "grader":
        rollout = find("rollout", supervisor)
        return next(iter(children(rollout)), None) if rollout else None
    return next((pid for pid in descendants(supervisor) if writes_to(pid, f"{role}.log")), None)


def pid_of(role: str, supervisor: int) -> int:
    pid = find(role, supervisor)
    assert pid, f"no {role} process"
    return pid


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
    checkpoint = actor_checkpoint(run, recipe)
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
