"""The check of a task before a process is started: the environment answers, and the tokenizer covers its prompts."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.config import Recipe
from midflight.envs.one_turn import first_text
from midflight.errors import ModelError, RecipeError
from midflight.launch.importing import users_code
from midflight.models.text import encode_prompt, joined
from midflight.protocols import Environment, GradedTask, Tokenizer
from midflight.types import Problem

_NUM_SAMPLES = 64
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "problem_id": (str,),
    "prompt": (str, list),
    "answer": (str,),
    "difficulty": (int,),
    "category": (str,),
    "source": (str,),
    "columns": (dict,),
}


def check_task(recipe: Recipe, environment: Environment | GradedTask, tokenizer: Tokenizer) -> None:
    """Check the first held-out problems and the first training problem.

    Raises: RecipeError if the environment fails or a prompt is too long; ModelError if the tokenizer does not cover a
    prompt.
    """
    for problem in _problems(recipe, environment):
        with users_code(f"task.type: {recipe.task.type}, reset()"):
            prompt = joined(first_text(environment, problem))
        _check_tokenizer_fits(recipe, tokenizer, prompt)
        num_tokens = len(encode_prompt(tokenizer, prompt))
        if num_tokens > recipe.engine.max_prompt_tokens:
            raise RecipeError(
                f"engine.max_prompt_tokens = {recipe.engine.max_prompt_tokens} is too small: a prompt of"
                f" {recipe.task.type} has {num_tokens} tokens"
            )


def _problems(recipe: Recipe, environment: Environment | GradedTask) -> list[Problem]:
    call = f"held_out_problems({_NUM_SAMPLES})"
    with users_code(f"task.type: {recipe.task.type}, {call}"):
        held_out = environment.held_out_problems(_NUM_SAMPLES)
    if not isinstance(held_out, Sequence):
        raise RecipeError(f"task.type: {recipe.task.type}.{call} returned a {type(held_out).__name__}, not a list")
    with users_code(f"task.type: {recipe.task.type}, problem(0)"):
        first = environment.problem(0)
    for method, problem in [*((call, problem) for problem in held_out), ("problem(0)", first)]:
        _check_problem(f"task.type: {recipe.task.type}.{method} returned a", problem)
    return [*held_out, first]


def _check_problem(returned: str, problem: object) -> None:
    """Check the fields of a problem. Raises: RecipeError that begins with `returned` and names the wrong field."""
    if not isinstance(problem, Problem):
        raise RecipeError(f"{returned} {type(problem).__name__}, not a Problem")
    for name, expected in _FIELD_TYPES.items():
        value = getattr(problem, name)
        if not isinstance(value, expected):
            types = " or ".join(item.__name__ for item in expected)
            raise RecipeError(f"{returned} Problem whose {name} is {value!r}, not of type {types}")


def _check_tokenizer_fits(recipe: Recipe, tokenizer: Tokenizer, prompt: str) -> None:
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    lost = sorted(set(prompt) - set(tokenizer.decode(token_ids)))
    # An unknown word may consist of known characters. A prompt may contain the unknown token on purpose.
    num_unknown = sum(token_id == tokenizer.unk_token_id for token_id in token_ids)
    num_written = prompt.count(tokenizer.unk_token) if tokenizer.unk_token else 0
    if lost or num_unknown > num_written:
        raise ModelError(
            f"the tokenizer in {recipe.model.path} cannot encode the prompt {prompt!r} of {recipe.task.type}: it has no"
            f" token for {' '.join(lost) or 'a part of it'}"
        )
