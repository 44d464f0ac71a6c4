"""User-defined verifiers that misbehave: their groups fail, or the run ends with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import midflight
from midflight.config import SHIPPED_RECIPES

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]
SETTINGS = (
    "batch.batch_size=16",
    "batch.group_size=4",
    "schedule.num_in_flight=16",
    "engine.threads=1",
    "trainer.threads=1",
)

# The problem number decides on the failure, so that whole groups fail and most groups succeed.
VERIFIERS = """
import time
from midflight.envs.chain_sums import ChainSums
from midflight.types import Grade

class FailsSometimes(ChainSums):
    def grade(self, problem, response):
        match int(problem.problem_id.rpartition("/")[2]):
            case 3:
                time.sleep(1000)
            case 5:
                raise LookupError("no reference solution")
            case 7:
                return Grade(float("nan"))
            case 9:
                return "correct"
        return super().grade(problem, response)

class AlwaysHangs(ChainSums):
    def grade(self, problem, response):
        time.sleep(1000)
"""


def train(tmp_path: Path, verifier: str, *arguments: str, expect: int) -> tuple[subprocess.CompletedProcess[str], Path]:
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    run = tmp_path / "run"
    task = (f"task.type=verifiers:{verifier}", f"run.directory={run}")
    done = subprocess.run(
        [sys.executable, "-m", "midflight", "train", str(RECIPE), *task, *SETTINGS, *arguments, "--json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(midflight.__file__).parents[1])])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == expect, done.stderr
    return done, run


def test_verifier_failures_drop_their_groups_and_are_logged(tmp_path: Path) -> None:
    few_steps = ("trainer.max_steps=6", "task.grading_timeout_s=0.5", "eval.num_problems=24")
    done, run = train(tmp_path, "FailsSometimes", *few_steps, expect=0)
    summary = json.loads(done.stdout)
    assert summary["steps"] == 6
    assert summary["samples"] == 6 * 16
    groups = summary["groups"]
    assert groups["failed"] == 4
    assert groups["trained"] == 6 * 4
    assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))
    log = (run / "logs" / "rollout.log").read_text()
    reasons = {
        3: "the verifier took longer than task.grading_timeout_s = 0.5",
        5: f"LookupError: no reference solution ({tmp_path / 'verifiers.py'}:12)",
        7: "ValueError: the reward is nan",
        9: "TypeError: grade() returned a str, not a Grade",
    }
    assert summary["failures"] == dict.fromkeys(reasons.values(), 1)
    assert 1 <= log.count("Traceback") <= 4, "one traceback per grading process, for the error inside the verifier"
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: 4 of 28 groups failed and were not trained on, most often (1 of 4) by ")
    for group, reason in reasons.items():
        assert log.count(f"of group {group} failed: {reason}") == 4
    assert log.count(" failed: ") == 16
    # Four held-out problems have these numbers too, with two responses each.
    for when in ("eval_before", "eval_after"):
        assert summary[when]["num_problems"] == 24
        assert 0 < summary[when]["sampled_accuracy"] < 1
    warnings = [line for line in done.stderr.splitlines() if "responses of an evaluation" in line]
    assert len(warnings) == 2
    for warning in warnings:
        assert warning.startswith("8 responses of an evaluation could not be graded; the last reason: ")


def test_a_verifier_that_always_hangs_ends_the_run(tmp_path: Path) -> None:
    settings = ("trainer.max_steps=6", "task.grading_timeout_s=0.5", "eval.num_problems=0")
    done, run = train(tmp_path, "AlwaysHangs", *settings, expect=1)
    reason = "the verifier took longer than task.grading_timeout_s = 0.5, 8 times in a row"
    assert done.stderr.splitlines() == [f"midflight: {reason}"]
    groups = json.loads((run / "summary.json").read_text())["groups"]
    assert groups["trained"] == 0
    assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))
