"""A run whose engines are servers: one is killed, one stopped, one joins, and no rollout starts again."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import midflight
from midflight.actor.partials import PartialBuffer
from midflight.config import load_recipe
from midflight.launch.engine_registry import read_entries
from midflight.launch.resuming import actor_checkpoint
from midflight.launch.run_directory import RunDirectory
from midflight.launch.streams import open_batches
from midflight.types import GeneratedTokens, Rollout, RolloutStatus, TrainingBatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu_demo.toml"
TIMEOUT_S = 240.0
BATCH_SIZE, GROUP_SIZE, MAX_LAG = 16, 4, 6
SETTINGS = (
    "engine.type=http",
    "task.type=long_sums:LongSums",
    "task.options.min_terms=12",
    f"batch.batch_size={BATCH_SIZE}",
    f"batch.group_size={GROUP_SIZE}",
    "schedule.num_in_flight=16",
    f"schedule.max_lag={MAX_LAG}",
    "eval.num_problems=0",
    "trainer.threads=1",
    "trainer.checkpoint_every=100000",  # no batch is trimmed before the end
    "trainer.max_steps=100000",
)
LONG_SUMS = """
from midflight.envs.chain_sums import ChainSums
from midflight.types import Grade

class LongSums(ChainSums):
    def grade(self, problem, response):
        return Grade(len(response) + 0.01 * response.count("1"))  # hardly two alike: all of them are trained on
"""


@contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "midflight", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def serving(run: RunDirectory, *overrides: str) -> Any:
    return started("serve", run.config, "--join", run.path, "serve.port=0", "engine.threads=1", *overrides)


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout
    return server.stdout.readline().removeprefix("serving at ").strip()


def wait_for(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert process.poll() is None, f"the run ended early: {process.communicate()[1]}"
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.01)


def num_lines(run: RunDirectory) -> int:
    return run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"midflight_{name} "))


def partial_rollouts(run: RunDirectory) -> list[Rollout]:
    """Those that were saved in the middle, with enough tokens to tell them apart."""
    with closing(PartialBuffer(run.partials)) as partials:
        checkpoint = partials.load()
    rollouts = checkpoint.rollouts if checkpoint else []
    return [each for each in rollouts if each.status is RolloutStatus.PARTIAL and len(each.generated) >= 8]


def batches_of(run: RunDirectory) -> dict[int, TrainingBatch]:
    """Those that are still in the stream, by offset."""
    with closing(sqlite3.connect(run.batches)) as database:
        (first,) = database.execute("SELECT min(offset) FROM records").fetchone()
    with closing(open_batches(run, load_recipe(run.config))) as batches:
        return dict(enumerate(batches.read(first, 10**6, timeout_s=0), first))


def sequences(batch: TrainingBatch) -> Iterator[GeneratedTokens]:
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


def check_books(run: RunDirectory, summary: dict[str, Any], batches: dict[int, TrainingBatch]) -> None:
    """Every group that was started is in one batch or open; versions never go down; no token is too old."""
    batch_groups = BATCH_SIZE // GROUP_SIZE
    groups = summary["groups"]
    assert groups["failed"] == groups["dropped"] == 0
    assert groups["started"] == groups["trained"] + groups["unfinished"]
    assert groups["trained"] == summary["steps"] * batch_groups
    checkpoint = actor_checkpoint(run, load_recipe(run.config))
    assert checkpoint
    state = checkpoint.state
    known = [group_id for batch in batches.values() for group_id in batch.group_ids] + state.open_group_ids
    assert len(set(known)) == len(known), "a group is in two batches, or in one and still open"
    assert set(known) <= set(range(state.next_group_id))
    assert state.next_group_id - len(known) == (state.num_batches - len(batches)) * batch_groups
    for batch in batches.values():
        assert max(batch.lag_histogram) <= MAX_LAG
        for sequence in sequences(batch):
            assert (np.diff(sequence.weight_versions) >= 0).all(), "a token follows one of a newer version"


def check_none_was_restarted(saved: list[Rollout], batches: dict[int, TrainingBatch]) -> None:
    assert saved
    trained = {group_id: batch for batch in batches.values() for group_id in batch.group_ids}
    went_on = [rollout for rollout in saved if rollout.group_id in trained]
    assert went_on
    found = [
        any(starts_with(each, rollout.generated) for each in sequences(trained[rollout.group_id]))
        for rollout in went_on
    ]
    # One whose reward is just its group's mean is left out.
    assert sum(found) >= max(1, len(went_on) - 2), "rollouts were generated again from their start"


def test_engines_are_killed_stopped_and_join_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long_sums.py").write_text(LONG_SUMS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(midflight.__file__).parents[1])]))
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as stack:
        training = stack.enter_context(started("train", RECIPE, f"run.directory={run.path}", *SETTINGS))
        wait_for(training, run.config.exists)
        first, second = (stack.enter_context(serving(run)) for _ in range(2))
        urls = [url_of(first), url_of(second)]
        wait_for(training, lambda: num_lines(run) >= 3 and all(metric(url, "requests_in_flight") for url in urls))

        first.kill()
        at_kill = partial_rollouts(run)
        killed_at = num_lines(run)
        wait_for(training, lambda: num_lines(run) >= killed_at + 6)

        third = stack.enter_context(serving(run))
        third_url = url_of(third)
        wait_for(training, lambda: metric(third_url, "requests_finished_total") >= BATCH_SIZE)
        assert len(read_entries(run.engines)) == 3, "who was killed is still registered"

        at_stop = partial_rollouts(run)
        second.send_signal(signal.SIGTERM)
        second.wait(TIMEOUT_S)
        stopped_at = num_lines(run)
        assert {entry.url for entry in read_entries(run.engines).values() if entry} == {urls[0], third_url}
        wait_for(training, lambda: num_lines(run) >= stopped_at + 6)
        batches = batches_of(run)
        training.send_signal(signal.SIGINT)
        _, stderr = training.communicate(timeout=TIMEOUT_S)
        assert training.returncode == 130, stderr
    batches |= batches_of(run)
    check_books(run, json.loads(run.summary.read_text()), batches)
    for saved in (at_kill, at_stop):
        check_none_was_restarted(saved, batches)
    names = [url.removeprefix("http://").replace(":", "-") for url in (*urls, third_url)]
    for name in names:
        assert f"engine {name} joined with weights of version " in stderr
    assert f"engine {names[0]} left: " in stderr
    assert stderr.count(f"engine {names[0]} is not there, and is tried again: ") == 1
    assert f"engine {names[1]} left: " in stderr
    assert "rollouts go on elsewhere" in stderr
