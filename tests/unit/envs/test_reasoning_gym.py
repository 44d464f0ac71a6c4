"""Tasks of reasoning-gym: problems, held-out questions, answers, verifiers, and refusals."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from midflight.config.tasks import ReasoningGymSource, RewardTerm
from midflight.envs.reasoning_gym import ReasoningGymTask, is_held_out
from midflight.errors import RecipeError
from midflight.launch.rewards import build_rewards
from midflight.types import Problem

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.slow  # the library takes seconds to import

SMALL_SUMS = {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def gym(
    tasks: list[str | dict[str, Any]], *, seed: int = 0, rewards: tuple[str, ...] = (), **keys: Any
) -> ReasoningGymTask:
    source = ReasoningGymSource.model_validate({"tasks": tasks, **keys})
    return ReasoningGymTask(source, rewards=build_rewards([RewardTerm(type=name) for name in rewards]), seed=seed)


def test_problem_is_a_question_of_a_task() -> None:
    problem = gym(["chain_sum"]).problem(3)
    assert problem.problem_id == "chain_sum/0/3"
    assert problem.category == "chain_sum"
    assert isinstance(problem.prompt, list)
    assert problem.text.startswith("State the final answer to the following arithmetic problem: ")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(problem), type=Problem) == problem


def test_problem_depends_on_the_seed_and_the_index_only() -> None:
    tasks: list[str | dict[str, Any]] = ["chain_sum", "countdown", "list_functions", "pool_matrix", "word_ladder"]
    first, second = gym(tasks, seed=1), gym(tasks, seed=1)
    forward = [first.problem(index).text for index in range(40)]
    assert [second.problem(index).text for index in reversed(range(40))][::-1] == forward
    assert gym(tasks, seed=2).problem(0).text != forward[0]


def test_problems_are_equal_in_another_process() -> None:
    program = (
        "import json, sys\nfrom midflight.config.tasks import ReasoningGymSource\n"
        "from midflight.envs.reasoning_gym import ReasoningGymTask\n"
        "from midflight.launch.rewards import build_rewards\n"
        "source = ReasoningGymSource.model_validate({'tasks': ['list_functions', 'countdown']})\n"
        "task = ReasoningGymTask(source, rewards=build_rewards([]))\n"
        "print(json.dumps([task.problem(index).text for index in range(6)]))\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert json.loads(printed[0]) == json.loads(printed[1])


def test_tasks_are_drawn_by_weight() -> None:
    task = gym([{"name": "chain_sum", "weight": 3.0}, "leg_counting"])
    names = [task.problem(index).category for index in range(200)]
    assert 130 <= names.count("chain_sum") <= 170
    held_out = [problem.category for problem in task.held_out_problems(8)]
    assert held_out == ["chain_sum"] * 6 + ["leg_counting"] * 2


def test_held_out_questions_are_never_training_questions() -> None:
    task = gym([SMALL_SUMS])  # about 200 different questions
    held_out = {problem.text for problem in task.held_out_problems(20)}
    assert len(held_out) == 20
    assert all(map(is_held_out, held_out))
    assert not held_out & {task.problem(index).text for index in range(400)}
    other_seed = gym([SMALL_SUMS], seed=9)
    assert [problem.text for problem in other_seed.held_out_problems(20)] == [
        problem.text for problem in task.held_out_problems(20)
    ]
    assert [problem.text for problem in task.held_out_problems(5)] == [
        problem.text for problem in task.held_out_problems(20)[:5]
    ]


@pytest.mark.parametrize(
    ("keys", "response", "accuracy"),
    [
        ({}, "{answer}", 1.0),
        ({}, "So <answer>0</answer>, no: <answer> {answer} </answer>.", 1.0),
        ({}, "<answer>{answer}</answer> <answer>x</answer>", 0.0),
        ({}, "", 0.0),
        ({"answer_pattern": r"= (\S+)"}, "1 = 2 = {answer}", 1.0),
        ({"answer_pattern": r"= (\S+)"}, "{answer}", 0.0),
    ],
)
def test_verifier_scores_the_answer_in_the_response(keys: dict[str, Any], response: str, accuracy: float) -> None:
    task = gym(["chain_sum"], **keys)
    problem = task.problem(0)
    grade = task.grade(problem, response.replace("{answer}", problem.answer))
    assert (grade.reward == 1.0, grade.components["accuracy"]) == (accuracy == 1.0, accuracy)


def test_verifier_accepts_other_right_answers() -> None:
    task = gym([{"name": "countdown", "options": {"min_numbers": 2, "max_numbers": 2}}])
    problem = task.problem(0)
    entry = pickle.loads(problem.columns["entry"])
    assert task.grade(problem, f"({entry['metadata']['expression']})").reward == 1.0


def test_verifier_that_raises_means_a_wrong_answer() -> None:
    task = gym(["prime_factorization"])
    grade = task.grade(task.problem(0), "nonsense")
    assert (grade.reward, grade.components["verifier_error"]) == (0.0, 1.0)


def test_further_rewards_are_added() -> None:
    task = gym(["chain_sum"], rewards=("exact",))
    problem = task.problem(0)
    grade = task.grade(problem, problem.answer)
    assert grade.reward == 2.0
    assert grade.components == {"score": 1.0, "accuracy": 1.0, "verifier_error": 0.0, "exact": 1.0}
    assert grade.answer == problem.answer


def test_prompt_can_have_a_template_and_be_plain_text() -> None:
    problem = gym(["chain_sum"], prompt_template="{question}\nIn <answer> tags.", chat=False).problem(0)
    assert isinstance(problem.prompt, str)
    assert problem.prompt.endswith("=\nIn <answer> tags.")


@pytest.mark.parametrize(
    ("tasks", "keys", "message"),
    [
        (["countdwn"], {}, r"task\.tasks\.0\.name: reasoning-gym has no task 'countdwn'; there is countdown"),
        (["composite"], {}, "has no task 'composite'"),
        ([{"name": "chain_sum", "options": {"max_term": 3}}], {}, "no option 'max_term'; there is max_terms"),
        ([{"name": "chain_sum", "options": {"seed": 3}}], {}, "seed is chosen by midflight"),
        (
            ["countdown", {"name": "chain_sum", "options": {"min_terms": 9}}],
            {},
            r"task\.tasks\.1: chain_sum refuses its options: max_terms must be >= min_terms",
        ),
        (["chain_sum"], {"answer_pattern": "("}, r"answer_pattern = '\(' is not a regular expression: missing \)"),
        (["chain_sum"], {"answer_pattern": "x"}, "answer_pattern = 'x' has no group"),
        (["chain_sum"], {"prompt_template": "x"}, "prompt_template has no place for the question"),
    ],
)
def test_wrong_keys_are_refused(tasks: list[str | dict[str, Any]], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        gym(tasks, **keys)


def test_task_that_depends_on_the_hash_seed_needs_a_fixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(RecipeError, match="start midflight with the environment variable PYTHONHASHSEED=0"):
        gym(["ransom_note"])
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert gym(["ransom_note"]).problem(0).category == "ransom_note"


def test_task_with_few_questions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.envs.reasoning_gym.is_held_out", lambda question: True)
    with pytest.raises(RecipeError, match="64 questions of chain_sum in a row are held out"):
        gym(["chain_sum"]).problem(0)
