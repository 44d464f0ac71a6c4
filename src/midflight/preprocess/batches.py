"""Graded groups -> one optimizer step's worth of packed microbatches, with everything measurable about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from midflight.preprocess.packing import pack
from midflight.types import (
    ActorState,
    FinishReason,
    Float32Array,
    Float64Array,
    Microbatch,
    Rollout,
    RolloutGroup,
    TrainingBatch,
    Trajectory,
)

Scalar = TypeVar("Scalar", bound=np.generic)

NUM_POSITIONS = 10  # parts of a response that lags are reported by


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What the recipe says about this stage."""

    advantage: Callable[[Float64Array], Float64Array]
    max_tokens: int  # per microbatch
    mask_older_than: int | None = None  # optimizer steps; tokens of a greater lag carry no loss


def build_batch(
    groups: Sequence[RolloutGroup],
    actor_state: ActorState,
    *,
    index: int,
    preprocessing: Preprocessing,
    generated_lengths: Sequence[int],
    dropped_lengths: Sequence[int],
    upstream_metrics: dict[str, float],
) -> TrainingBatch:
    """Batch `index`: advantages per group, then packing. Trajectories with zero advantage are counted, not packed.

    Leaving them out is exact for losses that are proportional to the advantage, which every loss here is.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    oldest = None if preprocessing.mask_older_than is None else index - preprocessing.mask_older_than
    trajectories = [
        trajectory_of(rollout, float(value), oldest)
        for group in groups
        for rollout, value in zip(group.rollouts, _advantages_of(group, preprocessing.advantage), strict=True)
    ]
    microbatches = pack(
        [trajectory for trajectory in trajectories if trajectory.advantages.any()], preprocessing.max_tokens
    )
    num_response_tokens = sum(len(rollout.generated) for rollout in rollouts)
    num_loss_tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
    return TrainingBatch(
        index=index,
        microbatches=microbatches,
        num_rollouts=len(rollouts),
        num_response_tokens=num_response_tokens,
        num_loss_tokens=num_loss_tokens,
        group_ids=[group.group_id for group in groups],
        lag_histogram=_lag_histogram(trajectories, index),
        lag_by_position=_lag_by_position(rollouts, index),
        trained_lengths=np.array([len(rollout.generated) for rollout in rollouts], np.int32),
        generated_lengths=np.array(generated_lengths, np.int32),
        dropped_lengths=np.array(dropped_lengths, np.int32),
        metrics={
            **_rollout_metrics(rollouts),
            "masked_token_fraction": 1 - num_loss_tokens / max(num_response_tokens, 1),
            "padding_fraction": _padding_fraction(microbatches),
            "dropped/tokens": float(sum(dropped_lengths)),
            **upstream_metrics,
        },
        actor_state=actor_state,
    )


def trajectory_of(rollout: Rollout, advantage: float, oldest_version: int | None = None) -> Trajectory:
    """The flat token view of a rollout; the same advantage for every sampled token that carries loss.

    Tokens sampled by a version before `oldest_version` do not: they are only what later ones follow.
    """
    prompt, generated = rollout.prompt_token_ids, rollout.generated
    num_prompt = len(prompt)
    length = num_prompt + len(generated)
    loss_mask = np.zeros(length, np.bool_)
    loss_mask[num_prompt:] = True if oldest_version is None else generated.weight_versions >= oldest_version
    return Trajectory(
        rollout_id=rollout.rollout_id,
        token_ids=np.concatenate([prompt, generated.token_ids]),
        loss_mask=loss_mask,
        behavior_logprobs=_after_prompt(generated.logprobs, num_prompt),
        weight_versions=_after_prompt(generated.weight_versions, num_prompt),
        advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
    )


def _after_prompt(values: npt.NDArray[Scalar], num_prompt: int) -> npt.NDArray[Scalar]:
    return np.concatenate([np.zeros(num_prompt, values.dtype), values])


def _advantages_of(group: RolloutGroup, advantage: Callable[[Float64Array], Float64Array]) -> Float64Array:
    return advantage(np.array([rollout.reward for rollout in group.rollouts], np.float64))


def _lag_histogram(trajectories: Sequence[Trajectory], index: int) -> dict[int, int]:
    """Optimizer steps from the sampling of each token that carries loss to the training on it -> tokens."""
    versions = np.concatenate([trajectory.weight_versions[trajectory.loss_mask] for trajectory in trajectories])
    lags, counts = np.unique(index - versions, return_counts=True)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))


def _lag_by_position(rollouts: Sequence[Rollout], index: int) -> Float32Array:
    """Mean lag in each tenth of the responses, relative to their own lengths."""
    lags, positions = [], []
    for rollout in rollouts:
        length = len(rollout.generated)
        lags.append(index - rollout.generated.weight_versions)
        positions.append(np.arange(length) * NUM_POSITIONS // max(length, 1))
    position_of = np.concatenate(positions)
    totals = np.bincount(position_of, np.concatenate(lags), minlength=NUM_POSITIONS)
    counts = np.bincount(position_of, minlength=NUM_POSITIONS)
    means = np.full(NUM_POSITIONS, np.nan)
    np.divide(totals, counts, out=means, where=counts > 0)
    return means.astype(np.float32)


def _padding_fraction(microbatches: Sequence[Microbatch]) -> float:
    """Room that is left in microbatches, against the fullest one: what ranks that wait for each other would waste."""
    lengths = [len(microbatch.token_ids) for microbatch in microbatches]
    return 1 - sum(lengths) / (len(lengths) * max(lengths)) if lengths else 0.0


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(rollout.generated) for rollout in rollouts]
    clipped = [rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    # Versions never go down along a sequence.
    num_versions = [1 + np.count_nonzero(np.diff(rollout.generated.weight_versions)) for rollout in rollouts]
    # The environment's own names come first: one of them may be "mean".
    metrics = _component_means(rollouts)
    metrics |= {
        "reward/mean": float(np.mean([rollout.reward for rollout in rollouts])),
        "length/mean": float(np.mean(lengths)),
        "length/max": float(max(lengths)),
        "length/clipped_fraction": float(np.mean(clipped)),
        "versions_per_rollout/max": float(max(num_versions)),
        "versions_per_rollout/mean": float(np.mean(num_versions)),
        "carried_token_fraction": sum(rollout.num_carried for rollout in rollouts) / max(sum(lengths), 1),
    }
    return metrics


def _component_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    names = sorted({name for rollout in rollouts for name in rollout.reward_components})
    return {
        f"reward/{name}": float(
            np.mean([rollout.reward_components[name] for rollout in rollouts if name in rollout.reward_components])
        )
        for name in names
    }
