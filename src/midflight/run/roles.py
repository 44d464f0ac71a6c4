"""Processes of a run by role. Imports no torch: the supervisor names the bodies, and only workers import them."""

from __future__ import annotations

import functools
from pathlib import Path

from midflight.config import Recipe
from midflight.run.worker_process import WorkerBody, WorkerContext

EVALUATION = "evaluation"  # role of the process that evaluates before and after training


def worker_bodies(recipe: Recipe) -> dict[str, WorkerBody]:
    """Return the body of each process of training, by name."""
    bodies: dict[str, WorkerBody] = {
        trainer_role(rank): functools.partial(_train, rank=rank) for rank in range(recipe.trainer.num_ranks)
    }
    bodies["rollout"] = _roll_out
    for worker in range(recipe.num_preprocess_workers):
        bodies[preprocess_role(worker)] = functools.partial(_preprocess, worker=worker)
    return bodies


def evaluation_bodies(model: Path) -> dict[str, WorkerBody]:
    """Return the body of the process that evaluates a model directory."""
    return {EVALUATION: functools.partial(_evaluate, model=model)}


def trainer_role(rank: int) -> str:
    return f"trainer-{rank}" if rank else "trainer"


def preprocess_role(worker: int) -> str:
    return f"preprocess-{worker}" if worker else "preprocess"


def _train(context: WorkerContext, rank: int) -> None:
    from midflight.run.workers import trainer_body

    trainer_body(context, rank)


def _roll_out(context: WorkerContext) -> None:
    from midflight.run.workers import rollout_body

    rollout_body(context)


def _preprocess(context: WorkerContext, worker: int) -> None:
    from midflight.run.workers import preprocess_body

    preprocess_body(context, worker)


def _evaluate(context: WorkerContext, model: Path) -> None:
    from midflight.run.evaluation import evaluation_body

    evaluation_body(context, model)
