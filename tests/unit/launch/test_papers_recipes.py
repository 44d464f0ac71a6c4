"""The papers' recipes pass all checks with small models of the same family and files of the same form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dataset_files import write_lines
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.launch.build import check_recipe
from midflight.launch.environments import build_environment, build_source
from published_models import write_published_model

PAPERS = {name: path for name, path in SHIPPED_RECIPES.items() if path.parent.name == "papers"}
FAMILIES = {"Qwen2.5-7B": "qwen2.5-7b", "Qwen3-4B": "qwen3", "Mistral-Small-24B-Instruct-2501": "mistral-0.3"}
MATH = {"problem": "What is 7 + 12?", "solution": "Add them.", "answer": "19"}
CHAT = {"prompt": [{"role": "user", "content": "What is 7 + 12?"}], "label": "19"}
TURNS = {
    "0": {"from": "human", "value": "What is 7 + 12?"},
    "1": {"from": "assistant", "ground_truth": {"value": "19", "pass_at_n": 0.5}},
}
ROWS: dict[str, dict[str, Any]] = {
    "HuggingFaceH4/MATH-500": {**MATH, "subject": "Algebra", "level": 2, "unique_id": "a"},
    "HuggingFaceH4/aime_2024": {**MATH, "id": 60, "url": "https://example.org", "year": "2024"},
    "Open-Reasoner-Zero/orz_math_57k_collection": TURNS,
    "Open-Reasoner-Zero/orz_math_72k_collection_extended": TURNS,
    "agentica-org/DeepScaleR-Preview-Dataset": MATH,
    "zhuzilin/aime-2024": CHAT,
    "zhuzilin/dapo-math-17k": CHAT,
}


@pytest.fixture
def small_recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    """Return a paper's recipe with files in place of datasets of the hub, a small model, and the CPU."""
    path = PAPERS[request.param]
    for number, row in enumerate(ROWS.values()):
        write_lines(tmp_path / f"{number}.jsonl", [row])

    def file_of(match: re.Match[str]) -> str:
        return f'path = "{[*ROWS].index(match[1])}.jsonl"'

    text = re.sub(r'hub_id = "([^"]+)"', file_of, path.read_text())
    copy = tmp_path / path.name
    copy.write_text(re.sub(r'split = "test"\n', "", text))
    model = write_published_model(FAMILIES[load_recipe(path).model.path.name], tmp_path / "model")
    devices = [
        "trainer.type=single",
        "trainer.device=cpu",
        "engine.device=cpu",
        "trainer.activation_checkpointing=true",
    ]
    return load_recipe(copy, [f"model.path={model}", *devices])


@pytest.mark.parametrize("small_recipe", PAPERS, indirect=True)
def test_checks_pass_with_files_of_the_same_form(small_recipe: Recipe) -> None:
    check_recipe(small_recipe)


@pytest.mark.parametrize("small_recipe", PAPERS, indirect=True)
def test_right_answer_gets_more_than_a_wrong_one(small_recipe: Recipe) -> None:
    tasks: list[Any] = [build_environment(small_recipe)]
    tasks += [build_source(small_recipe, each.task, "eval.sets") for each in small_recipe.eval.sets]
    for task in tasks:
        problem = task.problem(0)
        right, wrong = (task.grade(problem, f"It is \\boxed{{{answer}}}.").reward for answer in ("19", "20"))
        assert right > wrong
        assert problem.text.endswith("What is 7 + 12?")
