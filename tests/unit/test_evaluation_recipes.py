"""Shipped recipes of MATH-500, AIME 2024 and GSM8K, on files with the columns of the published datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from midflight.config import Recipe, load_recipe
from midflight.config.tasks import DatasetSource
from midflight.envs.routing import Router
from midflight.errors import RecipeError
from midflight.launch.environments import build_all_environments
from midflight.launch.evaluation import build_plan
from midflight.types import Grade, SamplingParams

RECIPES = Path(__file__).parents[2] / "src" / "midflight" / "recipes" / "evals"
ROWS: dict[str, list[dict[str, Any]]] = {
    "math500": [
        {
            "problem": "What is $3/6$ in lowest terms?",
            "solution": "Dividing by 3 gives $\\boxed{\\frac{1}{2}}$.",
            "answer": "\\frac{1}{2}",
            "subject": "Prealgebra",
            "level": 2,
            "unique_id": "test/prealgebra/1.json",
        }
    ],
    "aime24": [
        {
            "id": 60,
            "problem": "Find $n$ if $2n = 408$.",
            "solution": "Halve both sides.",
            "answer": "204",
            "url": "https://example.org",
            "year": "2024",
        }
    ],
    "gsm8k": [
        {
            "question": "Ann has 3 boxes of 500 pens and sells 260. How many are left?",
            "answer": "She has 3*500=<<3*500=1500>>1500 pens.\n1500-260=<<1500-260=1240>>1240 are left.\n#### 1,240",
        }
    ],
}
RIGHT = {"math500": "\\frac12", "aime24": "204", "gsm8k": "1240"}
WRONG = {"math500": "\\frac13", "aime24": "205", "gsm8k": "260"}


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.toml", ["model.path=model", *overrides])


def on_file(recipe: Recipe, name: str, tmp_path: Path) -> Recipe:
    """Replace the hub's dataset by a directory of the same form, with one file per split."""
    (item,) = recipe.eval.sets
    assert isinstance(item.task, DatasetSource)
    (tmp_path / f"{item.task.split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    source = item.task.model_copy(update={"path": tmp_path, "hub_id": None, "hub_config": None})
    sets = (item.model_copy(update={"task": source}),)
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"sets": sets})})


@pytest.mark.parametrize("name", ROWS)
def test_answers_are_graded_by_their_value(name: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("math_verify")
    recipe = on_file(recipe_of(name), name, tmp_path)
    router = build_all_environments(recipe)
    assert isinstance(router, Router)
    (questions,) = build_plan(recipe, router, SamplingParams(max_tokens=recipe.sampling.max_tokens)).question_sets
    (problem,) = questions.problems
    prompt = router.reset(problem)
    assert prompt[-1]["content"].endswith("put your final answer within \\boxed{}.")  # type: ignore[index]
    grades = []
    for answer in (RIGHT[name], WRONG[name]):
        router.reset(problem)
        grades.append(router.step(f"So the answer is \\boxed{{{answer}}}."))
    rewards = [grade.reward for grade in grades if isinstance(grade, Grade)]
    assert rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "samples", "sampling"),
    [("math500", 4, (0.7, 1.0, 32768)), ("aime24", 64, (0.7, 1.0, 40960)), ("gsm8k", 1, (0.0, 1.0, 1024))],
)
def test_sampling_is_that_of_the_papers(name: str, samples: int, sampling: tuple[float, float, int]) -> None:
    recipe = recipe_of(name)
    (item,) = recipe.eval.sets
    assert (item.samples, (item.temperature, item.top_p, item.max_tokens)) == (samples, sampling)
    assert recipe.max_eval_tokens == sampling[2]


def test_levels_and_subjects_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    recipe = on_file(recipe_of("math500"), "math500", tmp_path)
    plan = build_plan(recipe, build_all_environments(recipe), SamplingParams(max_tokens=16))
    (problem,) = plan.question_sets[0].problems
    assert (problem.difficulty, problem.category) == (2, "Prealgebra")


def test_without_a_model_the_recipe_says_so() -> None:
    with pytest.raises(RecipeError, match="model is missing"):
        load_recipe(RECIPES / "math500.toml")
