"""Recipes of the section "Datasets", run on the example dataset."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from midflight.config import load_recipe
from midflight.launch.environments import build_environment

ROOT = Path(__file__).parents[4]
SECTION = (ROOT / "docs" / "tasks.md").read_text().partition("## Datasets")[2].partition("\n## ")[0]
RECIPES = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)
NUM_PROBLEMS = {0: (14, 20), 1: (3, 6), 2: (1, 20)}


def test_the_section_has_recipes() -> None:
    assert len(RECIPES) == len(NUM_PROBLEMS)


@pytest.mark.parametrize("number", NUM_PROBLEMS)
def test_documented_recipes_make_problems(tmp_path: Path, number: int) -> None:
    (tmp_path / "word_problems.jsonl").write_text((ROOT / "examples" / "word_problems.jsonl").read_text())
    (tmp_path / "recipe.toml").write_text(f'{RECIPES[number]}\n[model]\npath = "model"\n')
    recipe = load_recipe(tmp_path / "recipe.toml", ["task.drop_long_prompts=false"] if number == 1 else [])
    task = build_environment(recipe)
    distinct = {task.problem(index).text for index in range(60)}
    low, high = NUM_PROBLEMS[number]
    assert low <= len(distinct & {text for text in distinct if "?" in text}) <= high


def test_the_example_has_the_documented_row() -> None:
    (row,) = re.findall(r"```json\n(.*?)\n```", SECTION)
    assert row in (ROOT / "examples" / "word_problems.jsonl").read_text().splitlines()
