"""Batches for several ranks, made of random rollouts instead of an engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.train_load import LoadShape, make_trajectories, on_policy
from midflight.preprocess.packing import assign_to_ranks, pack
from midflight.types import ActorState, GroupId, TrainingBatch, Trajectory


def make_batches(
    model: Path, vocab_size: int, load: LoadShape, *, num_batches: int, num_ranks: int, max_tokens: int
) -> list[TrainingBatch]:
    """Make batches with random rewards and the log-probabilities of the model in the directory `model`."""
    batches = []
    for index in range(num_batches):
        rng = np.random.default_rng(index)
        trajectories = [
            replace(trajectory, reward=float(rng.normal()))
            for trajectory in on_policy(make_trajectories(load, vocab_size, seed=index), model)
        ]
        batches.append(_batch(index, trajectories, num_ranks, max_tokens))
    return batches


def _batch(index: int, trajectories: Sequence[Trajectory], num_ranks: int, max_tokens: int) -> TrainingBatch:
    lengths = np.array([int(trajectory.loss_mask.sum()) for trajectory in trajectories], np.int32)
    local_batches = assign_to_ranks(len(trajectories), num_ranks, index)
    return TrainingBatch(
        index=index,
        microbatches=[pack([trajectories[row] for row in local], max_tokens) for local in local_batches],
        num_rollouts=len(trajectories),
        num_response_tokens=int(lengths.sum()),
        num_loss_tokens=int(lengths.sum()),
        group_ids=[GroupId(index)],
        lag_histogram={index: int(lengths.sum())},
        lag_by_position=np.full(10, index, np.float32),
        trained_lengths=lengths,
        has_gradient=np.ones(len(lengths), np.bool_),
        generated_lengths=lengths,
        dropped_lengths=np.zeros(0, np.int32),
        metrics={"versions_per_rollout/max": 1.0, "time/rollout_s": 0.0, "carried_token_fraction": 0.0},
        actor_state=ActorState(),
    )
