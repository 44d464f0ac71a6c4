"""A mixture of datasets while processes are killed: every group has the problem of an uninterrupted run."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from dataset_files import write_lines
from faults.runs import RECIPE, SETTINGS, Run, check_accounts, resume, training
from midflight.config import load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.envs.chain_sums import ChainSums
from midflight.envs.mixture import Mixture
from midflight.launch.environments import build_environment
from narrowing import instance

pytestmark = [pytest.mark.slow, pytest.mark.faults]

# The recipe's mixture, which writes the problem of every index that a process asks for.
_LOGGED = """
import json, os
from pathlib import Path

from midflight.config import load_recipe
from midflight.envs.mixture import Mixture
from midflight.launch.environments import build_environment

class Logged(Mixture):
    def __init__(self, recipe, log):
        mixture = build_environment(load_recipe(Path(recipe)))
        super().__init__(mixture.shares, seed=7)
        self._log = log

    def problem(self, index):
        problem = super().problem(index)
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps([index, problem.source, problem.problem_id]) + "\\n").encode())
        os.close(descriptor)
        return problem

def length(problem, response):
    return len(response) + 0.01 * response.count("1")
"""


def write_recipes(directory: Path, run: Path) -> tuple[Path, Path]:
    """Write two datasets of chain sums, a recipe that mixes them, and one with the logged mixture."""
    (directory / "logged.py").write_text(_LOGGED)
    sums = ChainSums(min_terms=12)
    sources = ""
    for name, weight in (("a", 1), ("b", 2)):
        problems = [sums.problem(100 * weight + index) for index in range(9)]
        write_lines(directory / f"{name}.jsonl", [{"prompt": item.prompt, "answer": item.answer} for item in problems])
        sources += (
            f'[[task.sources]]\nname = "{name}"\nweight = {weight}\n[task.sources.task]\ntype = "dataset"\n'
            f'chat = false\npath = "{name}.jsonl"\nrewards = ["logged:length"]\n'
        )
    top = f'[run]\nseed = 7\ndirectory = "{run}"\n[model]\npath = "{RECIPE.parent / "models" / "chain_sums"}"\n'
    mixed, logged = directory / "mixed.toml", directory / "logged.toml"
    mixed.write_text(f'{top}[task]\ntype = "mixture"\n{sources}')
    logged.write_text(
        f'{top}[task]\ntype = "logged:Logged"\noptions = {{recipe = "{mixed}", log = "{directory / "log"}"}}\n'
        '[schedule]\ntype = "pipeline"\nnum_in_flight = 16\n'
    )
    return mixed, logged


def test_killed_run_has_the_problems_of_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # checking a recipe adds its directory
    chance = random.Random(0)
    directory = RunDirectory(tmp_path / "run")
    mixed, logged = write_recipes(tmp_path, directory.path)
    with training(logged, *SETTINGS, "supervisor.backoff_s=0.02", "supervisor.max_restarts=100") as process:
        run = Run(directory, process)
        for role in ("rollout", "trainer", "supervisor"):
            run.wait_for_steps(chance.randint(1, 4))
            run.hurt(role)
        process.wait()
        summary, _ = resume(directory, 20)
    check_accounts(directory, summary)
    asked = {tuple(json.loads(line)) for line in (tmp_path / "log").read_text().splitlines()}
    uninterrupted = instance(build_environment(load_recipe(mixed)), Mixture)
    expected = [uninterrupted.problem(index) for index in range(len(asked))]
    assert asked == {(index, item.source, item.problem_id) for index, item in enumerate(expected)}
    assert len(asked) >= summary["groups"]["started"] > 3 * 18  # several epochs
