"""Evaluate a model directory with a recipe's task: the engine, all cores, held-out problems."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from midflight.actor.grading_pool import GradingPool
from midflight.config import Recipe
from midflight.evals.evaluate import Evaluation, evaluate
from midflight.launch.build import build_engine, build_sampling, num_threads
from midflight.launch.environments import build_environment
from midflight.models.loading import load_config, load_model, load_tokenizer, weights_of


def evaluate_model(recipe: Recipe, path: Path) -> Evaluation:
    """Raises: ModelError if the directory holds no model the engine can run."""
    torch.set_num_threads(num_threads(None, colocated=True))
    tokenizer = load_tokenizer(path)
    engine = build_engine(recipe, load_config(path), weights_of(load_model(path)), num_rows=recipe.eval.num_in_flight)
    make_environment = functools.partial(build_environment, recipe)
    with GradingPool(make_environment, recipe.task.num_graders, recipe.task.grading_timeout_s) as grader:
        return evaluate(
            engine,
            make_environment(),
            grader,
            tokenizer,
            build_sampling(recipe, tokenizer),
            num_problems=recipe.eval.num_problems,
            hard_from=recipe.eval.hard_from,
            seed=recipe.run.seed,
        )
