"""Evaluate a model directory with a recipe's task: the engine, all cores, held-out problems."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from midflight.config import Recipe
from midflight.evals.evaluate import Evaluation, Evaluator, evaluate, mean_or_none
from midflight.launch.build import build_grader, build_sampling, num_threads
from midflight.launch.engines import build_engine
from midflight.launch.environments import build_environment
from midflight.models.loading import load_config, load_model, load_tokenizer, weights_of
from midflight.protocols import Grader


def evaluate_model(recipe: Recipe, path: Path) -> Evaluation:
    """Raises: ModelError if the directory holds no model the engine can run."""
    with build_grader(recipe) as grader:
        evaluator = _evaluator(recipe, path, grader)
        return evaluate(
            evaluator,
            build_sampling(recipe, path, evaluator.tokenizer),
            num_problems=recipe.eval.num_problems,
            hard_from=recipe.eval.hard_from,
        )


def sampled_accuracy(recipe: Recipe, path: Path, grader: Grader) -> float:
    """As in `evaluate_model`, and nothing else; NaN without problems. The grader is the caller's, for many models."""
    evaluator = _evaluator(recipe, path, grader)
    problems = evaluator.environment.held_out_problems(recipe.eval.num_problems)
    accuracy = mean_or_none(evaluator.answers(problems, build_sampling(recipe, path, evaluator.tokenizer)).rewards)
    return math.nan if accuracy is None else accuracy


def _evaluator(recipe: Recipe, path: Path, grader: Grader) -> Evaluator:
    torch.set_num_threads(num_threads(None, colocated=True))
    weights = weights_of(load_model(path))
    engine = build_engine(recipe, load_config(path), weights, max_num_seqs=recipe.eval.num_in_flight)
    tokenizer = load_tokenizer(path)
    return Evaluator(engine, build_environment(recipe), grader, tokenizer, recipe.run.seed, recipe.max_length)
