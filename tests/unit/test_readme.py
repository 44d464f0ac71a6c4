"""README and other pages: length, the task of the README, and the existence of all named commands and files."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from midflight.cli.app import app
from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.launch.build import check_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMAND = re.compile(r"(?:^\$? ?|`)midflight ([a-z]+)\b([^`#\n]*)", re.MULTILINE)
MAKE = re.compile(r"(?:^|`)make ([a-z0-9-]+)", re.MULTILINE)
TEST_PATH = re.compile(r"-m pytest (tests/[\w/.]+)")
TASK = ["task.type=my_task:ThreeNumbers"]


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the task of the README as my_task.py."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_task.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    return tmp_path


def test_readme_has_at_most_140_lines() -> None:
    assert len(README.splitlines()) <= 140


def test_readme_task_rewards_right_sums_only(own_task: Path) -> None:
    check_recipe(load_recipe(SHIPPED_RECIPES["cpu_demo"], TASK))
    task = importlib.import_module("my_task").ThreeNumbers()
    problem = task.problem(0)
    digits = [int(each) for each in re.findall(r"\d", problem.prompt)]
    assert task.grade(problem, f"={sum(digits)}").reward == 1
    assert task.grade(problem, f"={sum(digits) + 1}").reward == 0
    assert task.problem(0) == problem
    held_out = {each.prompt for each in task.held_out_problems(200)}
    assert len(held_out) > 50
    assert held_out.isdisjoint(task.problem(index).prompt for index in range(1000))


@pytest.mark.slow
def test_readme_task_trains(own_task: Path) -> None:
    command = ["train", "cpu_demo", *TASK, "run.directory=run", "trainer.max_steps=2", "eval.num_problems=8"]
    subprocess.run([sys.executable, "-m", "midflight", *command], check=True, capture_output=True, timeout=250)
    assert len((own_task / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_exist(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for verb, arguments in COMMAND.findall(page.read_text()):
        assert verb in commands, f"midflight {verb}"
        levels = [commands[verb], *getattr(commands[verb], "commands", {}).values()]
        options = {name for level in levels for each in level.params for name in each.opts}
        assert options.issuperset(re.findall(r"--[a-z][a-z-]*", arguments)), f"midflight {verb}{arguments}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_make_targets_and_test_paths_of_a_page_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    assert targets.issuperset(MAKE.findall(text))
    for path in TEST_PATH.findall(text):
        assert (ROOT / path).exists(), path


def test_pages_name_commands() -> None:
    found = list(itertools.chain.from_iterable(COMMAND.findall(page.read_text()) for page in PAGES))
    assert {verb for verb, _ in found} >= {"demo", "train", "eval", "serve", "report", "compare", "plan", "simulate"}
