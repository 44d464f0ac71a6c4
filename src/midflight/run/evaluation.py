"""Evaluation of a model directory on held-out problems of a recipe's task, with the engine on all cores."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from midflight.config import Recipe
from midflight.evals.evaluate import Evaluation, Evaluator, evaluate, mean_or_none
from midflight.launch.build import build_grader, build_sampling, num_threads
from midflight.launch.engines import build_engine
from midflight.launch.environments import build_environment
from midflight.launch.prompts import build_prompts
from midflight.models.loading import load_config, load_model, load_tokenizer, weights_of
from midflight.protocols import Grader


def evaluate_model(recipe: Recipe, path: Path) -> Evaluation:
    """Evaluate a model directory, sampled and greedy.

    Raises: ModelError if the directory holds no model that the engine can run.
    """
    with build_grader(recipe) as grader:
        evaluator = _evaluator(recipe, path, grader)
        return evaluate(
            evaluator,
            build_sampling(recipe, path, evaluator.prompts),
            num_problems=recipe.eval.num_problems,
            hard_from=recipe.eval.hard_from,
        )


def sampled_accuracy(recipe: Recipe, path: Path, grader: Grader) -> float:
    """Return only the sampled accuracy of `evaluate_model`; NaN without problems.

    The caller passes the grader, so that several models can share one.
    """
    evaluator = _evaluator(recipe, path, grader)
    problems = evaluator.environment.held_out_problems(recipe.eval.num_problems)
    accuracy = mean_or_none(evaluator.answers(problems, build_sampling(recipe, path, evaluator.prompts)).rewards)
    return math.nan if accuracy is None else accuracy


def _evaluator(recipe: Recipe, path: Path, grader: Grader) -> Evaluator:
    torch.set_num_threads(num_threads(None, colocated=True))
    weights = weights_of(load_model(path))
    prompts = build_prompts(recipe, load_tokenizer(path))
    engine = build_engine(
        recipe,
        load_config(path),
        weights,
        max_num_seqs=recipe.eval.num_in_flight,
        stop_rules=prompts.stop_rules,
    )
    return Evaluator(engine, build_environment(recipe), grader, prompts, recipe.run.seed, recipe.max_length)
