"""Training runs for the fault tests: start, inspect while they run, and account for every group afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midflight
from midflight.actor.partials import PartialBuffer
from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import StreamError
from midflight.launch.build import build_reference
from midflight.launch.streams import open_batches, open_groups
from midflight.metrics.jsonl import read_metrics
from midflight.run.resuming import actor_checkpoint
from midflight.types import ChosenBatch, GeneratedTokens, Rollout, RolloutStatus, TrainingBatch

RECIPE = SHIPPED_RECIPES["cpu_demo"]
TIMEOUT_S = 120.0
BATCH_SIZE, GROUP_SIZE = 16, 4
SETTINGS = (
    f"batch.batch_size={BATCH_SIZE}",
    f"batch.group_size={GROUP_SIZE}",
    "eval.num_problems=0",
    "engine.threads=1",  # more threads than free cores slow a step down to seconds
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


_LONG_SUMS = """
from midflight.envs.chain_sums import ChainSums
from midflight.types import Grade

class LongSums(ChainSums):
    def grade(self, problem, response):
        return Grade(len(response) + 0.01 * response.count("1"))  # few ties: all are trained on

class LongTurns(LongSums):
    def reset(self, problem):
        self.said = []
        return problem.prompt

    def step(self, response):
        self.said.append(response)
        return "b2c3d4e5f6g7:" if len(self.said) < 3 else self.grade(None, "".join(self.said))
"""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "midflight", "train", *map(str, arguments)]


@contextmanager
def training(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(run: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    """Start a server that generates for the run, until the end of the block."""
    arguments = ("serve", run.config, "--join", run.path, "serve.port=0", "engine.threads=1")
    command = [sys.executable, "-m", "midflight", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def resume(run: RunDirectory, num_steps: int) -> tuple[dict[str, Any], str]:
    """Resume a run up to `num_steps`; return its summary and its log."""
    arguments = command(run.path, "--resume", f"trainer.max_steps={num_steps}", "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"the run ended early: {process.communicate()[1]}"
        assert time.monotonic() < deadline_s, "timeout"
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
    """Return the process of a role, recognized by its log, or None. Graders are children of the rollout process."""
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
    """Return the batches still in the stream, by offset. The trainer keeps batches it may need again."""
    first = 0
    with closing(open_batches(run, load_recipe(run.config))) as batches:
        try:
            batches.read(first, timeout_s=0)
        except StreamError as error:
            first = int(str(error).rpartition("the stream starts at ")[2])
        return dict(enumerate(batches.read(first, 10**6, timeout_s=0), first))


def waiting_of(run: RunDirectory) -> dict[int, ChosenBatch]:
    """Return the batches handed over but not yet preprocessed, by index."""
    recipe = load_recipe(run.config)
    if not recipe.num_preprocess_workers:
        return {}
    with closing(open_batches(run, recipe)) as batches, closing(open_groups(run, recipe)) as groups:
        first = batches.next_offset()
        return dict(enumerate(groups.read(first, 10**6, timeout_s=0), first))


def check_counts(summary: dict[str, Any]) -> None:
    groups = summary["groups"]
    assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))


def check_accounts(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Check that every started group is in one batch or open, and that the number of trimmed batches is right.

    With a reference, every batch has the reference's scores of its own tokens.
    """
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
    assert len(set(known)) == len(known), "a group is in two batches, or in a batch and open"
    assert set(known) <= set(range(checkpoint.state.next_group_id))
    assert checkpoint.state.next_group_id - len(known) == first * BATCH_SIZE // GROUP_SIZE
    assert {rollout.group_id for rollout in checkpoint.rollouts} <= set(checkpoint.state.open_group_ids)
    reference = None if recipe.loss.kl_coefficient is None else build_reference(recipe)
    for microbatch in (each for batch in batches.values() for share in batch.microbatches for each in share):
        if reference:
            assert microbatch.ref_logprobs is not None
            np.testing.assert_allclose(microbatch.ref_logprobs, reference.logprobs(microbatch), atol=1e-4)
        ends = np.cumsum(microbatch.sequence_lengths)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            own = slice(start, end)
            versions = microbatch.weight_versions[own][microbatch.loss_mask[own]]
            assert (np.diff(versions) >= 0).all(), "a weight version decreases within a sequence"


def long_sums(directory: Path, monkeypatch: pytest.MonkeyPatch, task: str = "LongSums") -> tuple[str, ...]:
    """Write a task with long responses and rewards that hardly ever tie, so every rollout is trained on.

    Return its settings. `task` is "LongSums", or "LongTurns" with three turns.
    """
    (directory / "long_sums.py").write_text(_LONG_SUMS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(Path(midflight.__file__).parents[1])]))
    return f"task.type=long_sums:{task}", "task.options.min_terms=12"


def saved_partials(run: RunDirectory) -> list[Rollout]:
    """Return the saved partial rollouts with enough tokens to tell them apart."""
    if not run.partials.exists():
        return []
    with closing(PartialBuffer(run.partials)) as partials:
        checkpoint = partials.load()
    rollouts = checkpoint.rollouts if checkpoint else []
    return [each for each in rollouts if each.status is RolloutStatus.PARTIAL and len(each.generated) >= 8]


def sequences(batch: TrainingBatch) -> Iterator[GeneratedTokens]:
    """Yield the sampled tokens of every sequence in a batch."""
    for microbatch in (each for share in batch.microbatches for each in share):
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


def check_saved_rollouts_continued(saved: list[Rollout], batches: dict[int, TrainingBatch]) -> None:
    """Check that rollouts in `batches` that were `saved` halfway continued from their saved tokens."""
    assert any(rollout.group_id in batch.group_ids for rollout in saved for batch in batches.values())
    for batch in batches.values():
        continued = [rollout.generated for rollout in saved if rollout.group_id in batch.group_ids]
        whole = list(sequences(batch))
        found = [part for part in continued if any(starts_with(each, part) for each in whole)]
        num_left_out = batch.num_rollouts - len(whole)  # rollouts whose reward equals the mean of their group
        assert len(found) >= len(continued) - num_left_out, "rollouts were generated again from the start"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Run:
    """Active run and its log lines."""

    directory: RunDirectory
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.said.append(line)

    def wait_until(self, condition: Callable[[], bool], poll_s: float = 0.002) -> None:
        """Wait for a condition that lasts. `poll_s` = 0 catches one that lasts for less than a millisecond."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"the run ended: {''.join(self.said)}"
            assert time.monotonic() < deadline_s, f"timeout: {''.join(self.said)}"
            if poll_s:
                time.sleep(poll_s)

    def wait_for_steps(self, num_steps: int) -> None:
        """Wait for new optimizer steps; steps repeated by a restarted trainer do not count."""
        goal = num_lines(self.directory) + num_steps
        self.wait_until(lambda: num_lines(self.directory) >= goal)

    def pid(self, role: str) -> int:
        found: list[int | None] = [None]

        def appears() -> bool:
            found[0] = find(role, self.process.pid)
            return found[0] is not None

        self.wait_until(appears)
        assert found[0] is not None
        return found[0]

    def hurt(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(role), number)
        print(f"fault: {number.name} to {role}", flush=True)

    def num_said(self, text: str) -> int:
        return sum(text in line for line in self.said)

    def end(self) -> dict[str, object]:
        """Stop the run with SIGTERM as a cluster does; check its groups and return its summary."""
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        assert self.process.returncode == 130, "".join(self.said)
        summary: dict[str, object] = json.loads(self.directory.summary.read_text())
        check_accounts(self.directory, summary)
        return summary


@contextmanager
def running(path: Path, *settings: str) -> Iterator[Run]:
    with training(RECIPE, f"run.directory={path}", *SETTINGS, *settings) as process:
        run = Run(RunDirectory(path), process)
        run.wait_until(lambda: num_lines(run.directory) >= 2)
        yield run
