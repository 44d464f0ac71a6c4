"""Recipe -> the questions of an evaluation: held-out problems of the task, and the sets of [[eval.sets]]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from midflight.config import Recipe
from midflight.config.evaluations import HELD_OUT, EvalSet
from midflight.envs.one_turn import first_text
from midflight.envs.routing import as_problem_of
from midflight.errors import PromptError, RecipeError
from midflight.evals.answering import QuestionSet
from midflight.evals.evaluate import EvaluationPlan
from midflight.launch.environments import build_set_environments
from midflight.launch.importing import users_code
from midflight.launch.rewards import term_name
from midflight.models.prompts import PromptFormat
from midflight.protocols import Environment, GradedTask
from midflight.types import Problem, SamplingParams

_NUM_PROBLEMS = 512  # of a set whose source can make any number of problems


def build_plan(
    recipe: Recipe, task: Environment | GradedTask, sampling: SamplingParams, *, with_greedy: bool = True
) -> EvaluationPlan:
    """Return the questions of an evaluation of this recipe; `task` makes the held-out problems.

    Raises: RecipeError if a set has no problems, or its source fails.
    """
    config = recipe.eval
    held_out = None
    if config.num_problems:
        problems = task.held_out_problems(config.num_problems)
        held_out = QuestionSet(HELD_OUT, problems, sampling, 1, recipe.max_length, _first_term(recipe.task))
    environments = build_set_environments(recipe)
    sets = [_question_set(recipe, item, environments, sampling) for item in config.sets]
    greedy = None
    if held_out and with_greedy:
        greedy = replace(held_out, sampling=replace(sampling, temperature=0.0))
    return EvaluationPlan((*([held_out] if held_out else []), *sets), greedy, config.hard_from)


def problems_of(item: EvalSet, environment: Environment | GradedTask) -> Sequence[Problem]:
    """Return the problems of a set: rows of a dataset in the order of the file, else held-out problems.

    Raises: RecipeError if there are none, or the source fails.
    """
    key = f"eval.sets: the set {item.name}"
    with users_code(key):
        if rows := getattr(environment, "evaluation_problems", None):
            problems: Sequence[Problem] = rows(item.num_problems)
        else:
            problems = environment.held_out_problems(item.num_problems or _NUM_PROBLEMS)
    if not problems:
        raise RecipeError(f"{key} has no problems; a source with at least one row would work")
    return problems


def check_sets(recipe: Recipe, prompts: PromptFormat) -> None:
    """Check the evaluation sets: each has problems, and its prompts fit. Raises: RecipeError."""
    environments = build_set_environments(recipe)
    for item in recipe.eval.sets:
        environment = environments[item.name]
        for problem in problems_of(item, environment):
            with users_code(f"eval.sets: the set {item.name}, reset()"):
                text = first_text(environment, problem)
            try:
                num_tokens = len(prompts.encode_prompt(text))
            except PromptError as error:
                raise RecipeError(f"eval.sets: the set {item.name}: {error}") from error
            if num_tokens > recipe.engine.max_prompt_tokens:
                raise RecipeError(
                    f"engine.max_prompt_tokens = {recipe.engine.max_prompt_tokens} is too small: the prompt"
                    f" {problem.problem_id} of the evaluation set {item.name} has {num_tokens} tokens"
                )


def _question_set(
    recipe: Recipe, item: EvalSet, environments: Mapping[str, Environment | GradedTask], base: SamplingParams
) -> QuestionSet:
    max_tokens = item.max_tokens or base.max_tokens
    sampling = replace(
        base,
        max_tokens=max_tokens,
        temperature=item.temperature,
        top_k=item.top_k,
        top_p=item.top_p,
        min_p=item.min_p,
    )
    problems = [as_problem_of(item.name, problem) for problem in problems_of(item, environments[item.name])]
    max_length = recipe.engine.max_prompt_tokens + max_tokens
    return QuestionSet(item.name, problems, sampling, item.samples, max_length, _first_term(item.task))


def _first_term(source: object) -> str | None:
    """Name of the first reward term of a source, whose value says that a response is right; None without terms."""
    terms = getattr(source, "rewards", ())
    return term_name(terms[0]) if terms else None
