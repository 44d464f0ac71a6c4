"""Evaluation of a model directory with a recipe's problems: alone, with the engine on all cores, or during a run."""

from __future__ import annotations

import functools
import logging
import math
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from midflight.actor.shares import Shares
from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.evals.answering import Evaluator
from midflight.evals.during_run import EvaluationDuringRun, Report
from midflight.evals.evaluate import Evaluation, evaluate
from midflight.launch.build import build_grader, build_sampling, num_threads, recipe_schedule
from midflight.launch.engines import build_engine
from midflight.launch.environments import build_all_environments
from midflight.launch.evaluation import build_plan
from midflight.launch.prompts import build_prompts
from midflight.metrics.evaluations import append_evaluation, forget_later, read_evaluations
from midflight.models.loading import load_config, load_model, load_tokenizer, weights_of
from midflight.models.prompts import PromptFormat
from midflight.protocols import Environment, GradedTask, Grader
from midflight.run.worker_process import WorkerContext


def evaluation_body(context: WorkerContext, model: Path) -> None:
    """Evaluate a model directory as a worker process, and tell the supervisor the result.

    There is nothing to save, so SIGTERM ends the process at once. Warnings of the evaluation reach the user.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.getLogger(evaluate.__module__).addHandler(_Notes(context))
    evaluation = evaluate_model(context.recipe, model, context.should_stop)
    context.tell("result", evaluation.to_json())


class _Notes(logging.Handler):
    """Sends log messages to the user."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(logging.WARNING)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        self._context.tell("note", record.getMessage())


def evaluate_model(recipe: Recipe, path: Path, on_step: Callable[[], object] = lambda: None) -> Evaluation:
    """Evaluate a model directory; `on_step` is called after every step of the engine.

    Raises: ModelError if the directory holds no model that the engine can run.
    """
    with build_grader(recipe) as grader:
        evaluator = _evaluator(recipe, path, grader)
        sampling = build_sampling(recipe, path, evaluator.prompts)
        return evaluate(evaluator, build_plan(recipe, evaluator.environment, sampling), on_step)


def sampled_accuracy(recipe: Recipe, path: Path, grader: Grader) -> float:
    """Return only the sampled accuracy of `evaluate_model`; NaN without problems.

    The caller passes the grader, so that several models can share one.
    """
    evaluator = _evaluator(recipe, path, grader)
    sampling = build_sampling(recipe, path, evaluator.prompts)
    only_held_out = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"sets": ()})})
    plan = build_plan(only_held_out, evaluator.environment, sampling, with_greedy=False)
    held_out = evaluate(evaluator, plan).sets
    figures = next((result.figures for result in held_out.values()), None)
    return figures.avg.value if figures else math.nan


def evaluation_during_run(
    recipe: Recipe,
    run: RunDirectory,
    version: int,
    shares: Shares,
    environment: Environment | GradedTask,
    prompts: PromptFormat,
) -> EvaluationDuringRun | None:
    """Return the evaluation of a run whose engines have weights of `version`; None unless the recipe wants one.

    Its results go to evaluations.jsonl.
    """
    if recipe.eval.interval is None:
        return None
    forget_later(run.evaluations, version)
    evaluated = read_evaluations(run.evaluations)
    evaluator = Evaluator(
        shares.evaluation_generator,
        environment,
        shares.evaluation_grader,
        prompts,
        recipe.run.seed,
        num_slots(recipe),
    )
    sampling = build_sampling(recipe, recipe.model.path, prompts)
    report: Report = functools.partial(append_evaluation, run.evaluations)
    return EvaluationDuringRun(
        evaluator,
        build_plan(recipe, environment, sampling),
        recipe.eval.interval,
        max((line["version"] for line in evaluated), default=0),
        report,
    )


def num_slots(recipe: Recipe) -> int:
    """Number of slots that an engine of a run has for evaluation; 0 without evaluations during the run.

    At most as many as training has, so that decoding steps of training rollouts do not become much slower.
    """
    if recipe.eval.interval is None:
        return 0
    return min(recipe.eval.num_in_flight, recipe_schedule(recipe).max_in_flight)


def _evaluator(recipe: Recipe, path: Path, grader: Grader) -> Evaluator:
    torch.set_num_threads(num_threads(None, colocated=True))
    prompts = build_prompts(recipe, load_tokenizer(path))
    engine = build_engine(
        recipe,
        load_config(path),
        weights_of(load_model(path)),
        max_num_seqs=recipe.eval.num_in_flight,
        max_new_tokens=recipe.max_eval_tokens,
        stop_rules=prompts.stop_rules,
    )
    environment = build_all_environments(recipe)
    return Evaluator(engine, environment, grader, prompts, recipe.run.seed, recipe.eval.num_in_flight)
