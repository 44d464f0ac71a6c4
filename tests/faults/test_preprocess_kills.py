"""Preprocessing processes that are killed: no batch is lost, trained on twice, or different."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from faults.runs import BATCH_SIZE, GROUP_SIZE, RECIPE, SETTINGS, check_accounts, resume, running, training
from midflight.config.run_directory import RunDirectory
from midflight.metrics.jsonl import read_metrics
from midflight.trainer.checkpoints import load_state, newest_checkpoint
from soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(600 * SOAK)]

REFERENCE = ("loss.kl_coefficient=0.01", "supervisor.backoff_s=0.02", "supervisor.max_restarts=1000")
NUM_KILLS = 12 * SOAK
NUM_WORKERS = 3
ROLES = ("preprocess", "preprocess-1", "preprocess-2")


def test_killed_workers_change_no_weight(tmp_path: Path) -> None:
    chance = random.Random(f"{NUM_KILLS} kills of preprocessing")
    conventional = ("schedule.type=conventional", *REFERENCE)
    with running(tmp_path / "killed", *conventional, f"preprocess.num_workers={NUM_WORKERS}") as run:
        for index in range(NUM_KILLS):
            time.sleep(chance.uniform(0, 1.5))  # not a wait for anything: spreads the kills over starts and steps
            run.hurt(ROLES[index % NUM_WORKERS])
            if index % 4 == 3:
                run.hurt(chance.choice(ROLES))
        run.wait_for_steps(2)
        restarts = run.end()["restarts"]
        assert isinstance(restarts, dict)
        assert restarts.keys() == set(ROLES)
    killed = newest_checkpoint(run.directory.checkpoints)
    assert killed
    undisturbed = RunDirectory(tmp_path / "undisturbed")
    settings = (*SETTINGS, *conventional, "preprocess.num_workers=0", f"trainer.max_steps={load_state(killed).version}")
    with training(RECIPE, f"run.directory={undisturbed.path}", *settings) as process:
        assert process.wait() == 0
    expected = undisturbed.checkpoints / killed.name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (killed / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.parametrize("schedule", ["schedule.type=pipeline", "schedule.type=bounded"])
def test_killed_rollouts_never_get_the_scores_of_others(tmp_path: Path, schedule: str) -> None:
    """Groups that are generated again after a kill have the ids of earlier groups, and other tokens."""
    chance = random.Random(f"{NUM_KILLS} kills of rollouts and preprocessing, {schedule}")
    directory = RunDirectory(tmp_path / "run")
    with running(directory.path, *REFERENCE, schedule, "preprocess.num_workers=2") as run:
        for _ in range(NUM_KILLS // 2):
            time.sleep(chance.uniform(0, 1.5))  # not a wait for anything
            for role in chance.sample(["rollout", *ROLES[:2]], chance.randint(1, 3)):
                run.hurt(role)
        run.wait_for_steps(4)
        run.end()  # checks the scores of every batch
    summary, _ = resume(directory, len(read_metrics(directory.metrics)) + 4)
    check_accounts(directory, summary)
    assert summary["groups"]["trained"] == summary["steps"] * BATCH_SIZE // GROUP_SIZE
