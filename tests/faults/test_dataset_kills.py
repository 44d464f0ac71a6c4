"""A mixture of datasets while processes are killed: every group has the problem of an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from dataset_files import write_lines
from faults.runs import BATCH_SIZE, GROUP_SIZE, RECIPE, SETTINGS, Run, resume, training
from midflight.config import load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.envs.chain_sums import ChainSums
from midflight.launch.environments import build_environment

pytestmark = pytest.mark.slow

_LOGGING_REWARD = """
import json, os

def logged(problem, response, log):
    line = json.dumps([problem.source, problem.problem_id, problem.columns["copy"]]) + "\\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)
    return float(len(response) % 7)
"""


def write_recipe(directory: Path, run: Path) -> Path:
    """Write two datasets of chain sums, a reward that logs its problems, and a recipe that mixes them."""
    (directory / "logging_reward.py").write_text(_LOGGING_REWARD)
    sums = ChainSums()
    for name, start in (("a", 0), ("b", 100)):
        problems = [sums.problem(start + index) for index in range(12)]
        rows = [{"prompt": item.prompt, "answer": item.answer, "copy": n} for n, item in enumerate(problems)]
        write_lines(directory / f"{name}.jsonl", rows)
    reward = f'{{type = "logging_reward:logged", options = {{log = "{directory / "log"}"}}}}'
    sources = "".join(
        f'[[task.sources]]\nname = "{name}"\nweight = {weight}\n[task.sources.task]\ntype = "dataset"\nchat = false\n'
        f'path = "{name}.jsonl"\nrewards = [{reward}]\n'
        for name, weight in (("a", 1), ("b", 2))
    )
    recipe = directory / "mixture.toml"
    model = RECIPE.parent / "models" / "chain_sums"
    recipe.write_text(
        f'[run]\ndirectory = "{run}"\n[model]\npath = "{model}"\n[task]\ntype = "mixture"\n{sources}'
        '[schedule]\ntype = "pipeline"\nnum_in_flight = 16\n'
    )
    return recipe


def test_killed_run_has_the_problems_of_an_uninterrupted_one(tmp_path: Path) -> None:
    chance = random.Random(0)
    directory = RunDirectory(tmp_path / "run")
    recipe = write_recipe(tmp_path, directory.path)
    with training(recipe, *SETTINGS, "supervisor.backoff_s=0.02", "supervisor.max_restarts=100") as process:
        run = Run(directory, process)
        for role in ("rollout", "trainer", "rollout", "supervisor"):
            run.wait_for_steps(chance.randint(2, 5))
            run.hurt(role, signal.SIGKILL)
        process.wait()
    summary, _ = resume(directory, 30)
    graded = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    task = build_environment(load_recipe(recipe))
    num_groups = summary["groups"]["started"]
    expected = [task.problem(index) for index in range(num_groups)]
    rows = [[problem.source, problem.problem_id, problem.columns["copy"]] for problem in expected]
    num_trained = 30 * BATCH_SIZE // GROUP_SIZE
    assert num_groups >= num_trained
    # A group is graded once, except for responses that a killed process had not handed over.
    for row in {tuple(row) for row in rows[:num_trained]}:
        assert graded.count(list(row)) >= GROUP_SIZE * rows[: num_trained - 16].count(list(row))
    assert all(row in rows for row in graded)
