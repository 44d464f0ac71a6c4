"""A user's task that cannot work is refused before a process starts, in one line that names the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.errors import ModelError, RecipeError
from midflight.launch.build import check_evaluation
from midflight.launch.environments import build_environment
from midflight.types import Grade, Problem

RECIPE = SHIPPED_RECIPES["cpu_demo"]


class Task:
    """Task whose prompts are all `prompt`, and which takes no seed."""

    prompt, answer = "a1:", "1"

    def problem(self, index: int) -> Problem:
        return Problem(str(index), self.prompt, self.answer)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return [self.problem(index) for index in range(num_problems)]

    def grade(self, problem: Problem, response: str) -> Grade:
        return Grade(1.0)


class TakesSeed(Task):
    def __init__(self, seed: int) -> None:
        self.seed = seed


class TakesAnything(Task):
    def __init__(self, **options: int) -> None:
        self.seed = options["seed"]


class TakesPath(Task):
    def __init__(self, path: str) -> None:
        Path(path).read_text()


class NoColumn(Task):
    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return [Problem("0", {"text": "a1:"}["question"], "1")]


class NotAList(Task):
    def held_out_problems(self, num_problems: int) -> Any:
        return None


class NotProblems(Task):
    def problem(self, index: int) -> Any:
        return "a1:"


class NumberAsAnswer(Task):
    answer = 1  # type: ignore[assignment]


class NoHeldOutProblems:
    problem, grade = Task.problem, Task.grade
    prompt, answer = "a1:", "1"


class SpecialTokens(Task):
    prompt, answer = "<bos>a1:<eos><unk>", "Ответ, which is never fed to the model"


class UnknownCharacter(Task):
    prompt = "a1¿:"


class LongPrompt(Task):
    prompt = "a1" * 40


def recipe(task: type | str, *overrides: str) -> Recipe:
    name = task if isinstance(task, str) else f"{__name__}:{task.__name__}"
    return load_recipe(RECIPE, [f"task.type={name}", *overrides])


@pytest.mark.parametrize("task", [TakesSeed, TakesAnything])
def test_class_with_a_seed_parameter_gets_the_runs_seed(task: type) -> None:
    for options, seed in ((["run.seed=7"], 7), (["run.seed=7", "task.options.seed=9"], 9)):
        environment: Any = build_environment(recipe(task, *options))
        assert environment.seed == seed


@pytest.mark.parametrize("task", [Task, SpecialTokens])
def test_working_task_passes(task: type) -> None:
    check_evaluation(recipe(task))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NoColumn, rf", held_out_problems\(64\): KeyError: 'question' \(.*{Path(__file__).name}:\d+\)$"),
        (NotAList, r"NotAList.held_out_problems\(64\) returned a NoneType, not a list"),
        (NotProblems, r"NotProblems.held_out_problems\(64\) returned a str, not a Problem"),
        (NumberAsAnswer, r"held_out_problems\(64\) returned a Problem whose answer is 1, not of type str"),
        (NoHeldOutProblems, r"NoHeldOutProblems' does not implement Environment: it lacks held_out_problems$"),
        (LongPrompt, r"engine.max_prompt_tokens = 64 is too small: a prompt of .* has 80 tokens"),
        (TakesPath, r"^task.options: .*TakesPath: missing a required argument: 'path'$"),
        ("json:decoder", r"'json:decoder' is of type module, not a class"),
    ],
)
def test_broken_task_is_refused_with_the_reason(task: type | str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_evaluation(recipe(task))


def test_unknown_option_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^task.options: .*Task: got an unexpected keyword argument 'color'$"):
        build_environment(recipe(Task, "task.options.color=1"))


def test_error_of_the_constructor_names_its_place() -> None:
    with pytest.raises(RecipeError, match=r"the constructor: FileNotFoundError: .*'/nowhere' \(.*test_task_check.py:"):
        build_environment(recipe(TakesPath, "task.options.path=/nowhere"))


def test_error_of_the_module_names_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_task.py").write_text("import json\n\njson.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"^task.type: cannot import 'broken_task:Task': JSONDecodeError: .*:3\)$"):
        build_environment(recipe("broken_task:Task"))


def test_prompt_that_the_tokenizer_cannot_encode_is_refused() -> None:
    with pytest.raises(ModelError, match=r"cannot encode .*'a1¿:' of .*UnknownCharacter: it has no token for ¿"):
        check_evaluation(recipe(UnknownCharacter))
