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

    prompt: Any = "a1:"
    answer = "1"

    def problem(self, index: int) -> Problem:
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return Problem(str(index), prompt, self.answer)

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


class Chat(Task):
    prompt = ({"role": "user", "content": "a1:"},)


class NotText(Task):
    prompt = ({"role": "user", "text": "a1:"},)


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
        (
            LongPrompt,
            r"engine.max_prompt_tokens = 64 is too small: the longest of 65 prompts of .* has 80 tokens; .* = 80 would",
        ),
        (NotText, r"NotText, reset\(\): TypeError: reset\(\) returned a message whose content is a NoneType"),
        (Chat, r"Chat: the prompt is a list of .* no chat template; task.chat_template = 'FILE', or a prompt of plain"),
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


def test_template_file_makes_messages_work(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    check_evaluation(recipe(Chat, f"task.chat_template={template}"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system messages') }}", "refuses a prompt: no system messages$"),
        ("one\n{{ messages", "line 2 is not valid Jinja: "),
        (None, r"chat.jinja cannot be read: No such file or directory$"),
        ("{{ messages[0].content * 40 }}", "the longest of 65 prompts of .* has 120 tokens; .* = 120 would work$"),
    ],
)
def test_template_that_does_not_work_is_refused(template: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    if template is not None:
        path.write_text(template)
    with pytest.raises(RecipeError, match=message):
        check_evaluation(recipe(Chat, f"task.chat_template={path}"))


def test_broken_template_is_refused_for_plain_text_too(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for")
    with pytest.raises(RecipeError, match=r"^task.chat_template: .*chat.jinja: line 1 is not valid Jinja: "):
        check_evaluation(recipe(Task, f"task.chat_template={path}"))


def test_reserved_template_argument_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^task.chat_template_arguments: .* reserved name 'messages'; leave it out"):
        check_evaluation(recipe(Task, "task.chat_template_arguments.messages=1"))


def test_system_prompt_for_plain_text_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^task.system_prompt is for prompts that are messages, .* leave it out, or"):
        check_evaluation(recipe(Task, "task.system_prompt='Be brief.'"))
