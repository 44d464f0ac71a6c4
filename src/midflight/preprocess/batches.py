"""Graded groups -> one optimizer step's worth of packed microbatches, with everything measurable about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from midflight.preprocess.advantages import Float64Array
from midflight.preprocess.packing import pack
from midflight.types import (
    ActorState,
    FinishReason,
    Rollout,
    RolloutGroup,
    TrainingBatch,
    Trajectory,
)

Scalar = TypeVar("Scalar", bound=np.generic)


def build_batch(
    groups: Sequence[RolloutGroup],
    actor_state: ActorState,
    *,
    index: int,
    advantage: Callable[[Float64Array], Float64Array],
    max_tokens: int,
    upstream_metrics: dict[str, float],
) -> TrainingBatch:
    """Batch `index`: advantages per group, then packing. Trajectories with zero advantage are counted, not packed.

    Leaving them out is exact for losses that are proportional to the advantage, which every loss here is.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trajectories = [
        trajectory_of(rollout, float(value))
        for group in groups
        for rollout, value in zip(group.rollouts, _advantages_of(group, advantage), strict=True)
    ]
    microbatches = pack([trajectory for trajectory in trajectories if trajectory.advantages.any()], max_tokens)
    lags = _lag_histogram(rollouts, index)
    return TrainingBatch(
        index=index,
        microbatches=microbatches,
        num_rollouts=len(rollouts),
        num_response_tokens=sum(len(rollout.generated) for rollout in rollouts),
        group_ids=[group.group_id for group in groups],
        lag_histogram=lags,
        metrics={**_rollout_metrics(rollouts), **upstream_metrics},
        actor_state=actor_state,
    )


def trajectory_of(rollout: Rollout, advantage: float) -> Trajectory:
    """The flat token view of a rollout; the same advantage for every sampled token."""
    prompt, generated = rollout.prompt_token_ids, rollout.generated
    num_prompt = len(prompt)
    length = num_prompt + len(generated)
    loss_mask = np.zeros(length, np.bool_)
    loss_mask[num_prompt:] = True
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


def _lag_histogram(rollouts: Sequence[Rollout], index: int) -> dict[int, int]:
    """Optimizer steps from the sampling of each token to the training on it -> tokens."""
    lags = Counter[int]()
    for rollout in rollouts:
        values, counts = np.unique(index - rollout.generated.weight_versions, return_counts=True)
        lags.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return dict(lags)


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(rollout.generated) for rollout in rollouts]
    clipped = [rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    num_versions = [len(np.unique(rollout.generated.weight_versions)) for rollout in rollouts]
    metrics = {
        "reward/mean": float(np.mean([rollout.reward for rollout in rollouts])),
        "length/mean": float(np.mean(lengths)),
        "length/max": float(max(lengths)),
        "length/clipped_fraction": float(np.mean(clipped)),
        "versions_per_rollout/max": float(max(num_versions)),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.reward_components}):
        values = [rollout.reward_components[name] for rollout in rollouts if name in rollout.reward_components]
        metrics[f"reward/{name}"] = float(np.mean(values))
    return metrics
