"""The rollout process is killed during an evaluation: the run goes on, and every result is complete."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from faults.runs import RECIPE, SETTINGS, TIMEOUT_S, check_accounts, pid_of, training, wait_for
from midflight.config.run_directory import RunDirectory
from midflight.metrics.evaluations import read_evaluations
from midflight.trainer.checkpoints import checkpoint_of

pytestmark = pytest.mark.slow

SETS = 'eval.sets=[{name = "sums", samples = 4, num_problems = 64, task = {}}]'


@pytest.mark.timeout(300)
def test_a_killed_evaluation_is_repeated_or_dropped(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    settings = [item for item in SETTINGS if not item.startswith(("trainer.max_steps", "trainer.checkpoint_every"))]
    evaluation = (SETS, "eval.every=4", "trainer.max_steps=18", "trainer.checkpoint_every=1000")
    with training(
        RECIPE, f"run.directory={run.path}", *settings, *evaluation, "schedule.num_in_flight=16", "schedule.max_lag=3"
    ) as process:
        # The checkpoint of version 4 is there, so its evaluation is under way; it takes seconds.
        wait_for(process, checkpoint_of(run.checkpoints, 4).exists)
        assert [line["version"] for line in read_evaluations(run.evaluations)] == [0]
        os.kill(pid_of("rollout", process.pid), signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
    summary = json.loads(run.summary.read_text())
    check_accounts(run, summary)
    assert summary["restarts"] == {"rollout": 1}
    lines = read_evaluations(run.evaluations)
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, 18)
    assert all(version % 4 == 0 for version in versions[1:-1])
    assert all(line["sets"]["sums"]["num_problems"] == 64 and line["num_ungraded"] == 0 for line in lines)
    assert len(versions) >= 3
