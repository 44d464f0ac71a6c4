"""Examples of a task and a loss: their results, and a short run with both."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples.my_loss import tapered
from examples.my_task.checked_sums import CheckedSums

from midflight.errors import RecipeError
from midflight.losses.inputs import LossInputs
from midflight.metrics.jsonl import read_metrics
from midflight.types import Problem

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBLEM = Problem("test", "a3b9c4:", "16")


@pytest.mark.parametrize(
    ("response", "accuracy", "steps"),
    [
        ("a3,3b9,12c4,16=16", 1, 1),
        ("=16", 1, 0),
        ("a3,3b9,12c4,15=15", 0, 2 / 3),
        ("a3,3b9,12c4,16d1,17=16", 1, 3 / 4),
        ("a3,3b9,12", 0, 0),
        ("", 0, 0),
    ],
)
def test_half_of_the_reward_is_for_the_steps(response: str, accuracy: float, steps: float) -> None:
    grade = CheckedSums().grade(PROBLEM, response)
    assert grade.components == pytest.approx({"accuracy": accuracy, "steps": steps})
    assert grade.reward == pytest.approx((accuracy + steps) / 2)


def test_the_task_holds_problems_out_and_names_a_wrong_option() -> None:
    task = CheckedSums(num_terms=4)
    held_out = {problem.prompt for problem in task.held_out_problems(64)}
    assert held_out.isdisjoint(task.problem(index).prompt for index in range(512))
    with pytest.raises(RecipeError, match="num_terms = 2 is not in 3 to 26"):
        CheckedSums(num_terms=2)


def test_the_loss_tapers_bad_tokens_only() -> None:
    """With ratios 2 and 1/2 and advantages +1 and -1, only the bad token with ratio 1/2 has a smaller weight."""
    ratios = [2.0, 0.5, 2.0, 0.5]
    policy = torch.full((4,), -1.0, requires_grad=True)
    behavior = torch.tensor([-1.0 - math.log(ratio) for ratio in ratios])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    output = tapered(LossInputs(policy, behavior, advantages, torch.ones(4), torch.zeros(4, dtype=torch.int64), 1))
    output.loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-1, -1, 1, 0.5])
    assert output.token_metrics["tapered"].tolist() == [0, 0, 0, 1]


@pytest.mark.slow
def test_the_task_trains_with_the_loss(tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", EXAMPLES / "my_task" / "recipe.toml"
    small = ("batch.batch_size=16", "schedule.num_in_flight=16", "eval.num_problems=16", "trainer.max_steps=3")
    loss = ("loss.type=my_loss:tapered", "loss.options.max_negative_ratio=0.5")
    done = subprocess.run(
        [sys.executable, "-m", "midflight", "train", str(recipe), f"run.directory={run}", *small, *loss, "--json"],
        cwd=EXAMPLES,  # the task lies beside the recipe, the loss in the working directory
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["groups"]["failed"]) == (3, 0)
    lines = read_metrics(run / "metrics.jsonl")
    for line in lines:
        assert line["reward/mean"] == pytest.approx((line["reward/accuracy"] + line["reward/steps"]) / 2)
    assert any(0 < line["tapered"] < 1 for line in lines)
