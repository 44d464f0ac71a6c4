"""The check of a task before a process is started: the environment answers, and the tokenizer covers its prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from midflight.config import Recipe
from midflight.config.tasks import DatasetSource, MixtureSource, ReasoningGymSource
from midflight.envs.mixture import Mixture
from midflight.envs.one_turn import first_text
from midflight.errors import ModelError, PromptError, RecipeError
from midflight.launch.importing import users_code
from midflight.models.prompts import PromptFormat
from midflight.models.tokenizer import Tokenizer
from midflight.protocols import Environment, GradedTask
from midflight.types import Problem, Text

_NUM_SAMPLES = 64
_CHAT_SOURCES = (DatasetSource, ReasoningGymSource)  # have the key `chat`
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "problem_id": (str,),
    "prompt": (str, list),
    "answer": (str,),
    "difficulty": (int,),
    "category": (str,),
    "source": (str,),
    "columns": (dict,),
}


def check_task(recipe: Recipe, environment: Environment | GradedTask, prompts: PromptFormat) -> None:
    """Check the first held-out problems and the first training problem, of every source in a mixture.

    Raises: RecipeError if the environment fails, or a prompt is too long or is refused by the chat template; ModelError
    if the tokenizer does not cover a prompt.
    """
    task = recipe.task
    if task.chat_template:
        with _refusals(recipe, prompts):
            prompts.check_syntax()
    texts = []
    for problem in _problems(recipe, environment):
        with users_code(f"task.type: {task.type}, reset()"):
            texts.append(first_text(environment, problem))
    for text in texts:
        _check_tokenizer_fits(recipe, prompts.tokenizer, text)
    if task.system_prompt is not None and not isinstance(task, MixtureSource) and all(map(_is_plain, texts)):
        raise RecipeError(
            f"task.system_prompt is for prompts that are messages, but the prompts of {task.type} are plain text; leave"
            f" it out, or {_how_to_chat(recipe)}"
        )
    with _refusals(recipe, prompts):
        longest = max(len(prompts.encode_prompt(text)) for text in texts)
    check_length(recipe, longest, len(texts))


def check_length(recipe: Recipe, longest: int, num_prompts: int) -> None:
    """Check the length of the longest of `num_prompts` prompts (tokens). Raises: RecipeError."""
    limit = recipe.engine.max_prompt_tokens
    if longest > limit:
        drop = " or task.drop_long_prompts = true" if isinstance(recipe.task, DatasetSource) else ""
        raise RecipeError(
            f"engine.max_prompt_tokens = {limit} is too small: the longest of {num_prompts} prompts of"
            f" {recipe.task.type} has {longest} tokens; engine.max_prompt_tokens = {longest}{drop} would work"
        )


def _is_plain(text: Text) -> bool:
    return isinstance(text, str)


def _how_to_chat(recipe: Recipe) -> str:
    return "set task.chat = true" if isinstance(recipe.task, _CHAT_SOURCES) else "make each prompt a list of messages"


@contextlib.contextmanager
def _refusals(recipe: Recipe, prompts: PromptFormat) -> Iterator[None]:
    """Turn a PromptError into a RecipeError that names the template and the keys to change."""
    try:
        yield
    except PromptError as error:
        task = recipe.task
        if task.chat_template:
            raise RecipeError(f"task.chat_template: {task.chat_template}: {error}") from error
        if prompts.has_template:
            raise RecipeError(f"task.type: {task.type}: {error}; the template is of {recipe.model.path}") from error
        plain = "task.chat = false" if isinstance(task, _CHAT_SOURCES) else "a prompt of plain text"
        raise RecipeError(
            f"task.type: {task.type}: {error}; task.chat_template = 'FILE', or {plain} would work"
        ) from error


def _problems(recipe: Recipe, environment: Environment | GradedTask) -> list[Problem]:
    call = f"held_out_problems({_NUM_SAMPLES})"
    with users_code(f"task.type: {recipe.task.type}, {call}"):
        held_out = environment.held_out_problems(_NUM_SAMPLES)
    if not isinstance(held_out, Sequence):
        raise RecipeError(f"task.type: {recipe.task.type}.{call} returned a {type(held_out).__name__}, not a list")
    with users_code(f"task.type: {recipe.task.type}, problem(0)"):
        firsts = environment.first_problems() if isinstance(environment, Mixture) else [environment.problem(0)]
    for method, problems in ((call, held_out), ("problem(0)", firsts)):
        for problem in problems:
            _check_problem(f"task.type: {recipe.task.type}.{method} returned a", problem)
    return [*held_out, *firsts]


def _check_problem(returned: str, problem: object) -> None:
    """Check the fields of a problem. Raises: RecipeError that begins with `returned` and names the wrong field."""
    if not isinstance(problem, Problem):
        raise RecipeError(f"{returned} {type(problem).__name__}, not a Problem")
    for name, expected in _FIELD_TYPES.items():
        value = getattr(problem, name)
        if not isinstance(value, expected):
            types = " or ".join(item.__name__ for item in expected)
            raise RecipeError(f"{returned} Problem whose {name} is {value!r}, not of type {types}")


def _check_tokenizer_fits(recipe: Recipe, tokenizer: Tokenizer, text: Text) -> None:
    for prompt in [text] if isinstance(text, str) else [message["content"] for message in text]:
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        lost = sorted(set(prompt) - set(tokenizer.decode(token_ids)))
        # An unknown word may consist of known characters. A prompt may contain the unknown token on purpose.
        num_unknown = sum(token_id == tokenizer.unk_token_id for token_id in token_ids)
        num_written = prompt.count(tokenizer.unk_token) if tokenizer.unk_token else 0
        if lost or num_unknown > num_written:
            raise ModelError(
                f"the tokenizer in {recipe.model.path} cannot encode the prompt {prompt!r} of {recipe.task.type}: it"
                f" has no token for {' '.join(lost) or 'a part of it'}"
            )
