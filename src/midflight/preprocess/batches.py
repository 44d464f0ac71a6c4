"""Build the packed microbatches of one optimizer step from graded groups, and measure the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from midflight.errors import RecipeError
from midflight.metrics.segments import NUM_POSITIONS, tenths
from midflight.preprocess.advantages import Advantage, normalize
from midflight.preprocess.packing import assign_to_ranks, pack
from midflight.preprocess.rewards import overlong_penalty
from midflight.types import (
    BoolArray,
    ChosenBatch,
    FinishReason,
    Float32Array,
    Float64Array,
    GeneratedTokens,
    Microbatch,
    Rollout,
    RolloutGroup,
    RolloutId,
    TrainingBatch,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Settings of this stage, from the recipe."""

    advantage: Advantage | None  # None: a value function in the trainer estimates advantages
    max_tokens: int  # per microbatch
    max_response_tokens: int
    normalize_advantages: bool = False
    mask_older_than: int | None = None  # optimizer steps; tokens of a greater lag carry no loss
    mask_truncated: bool = False  # truncated responses carry no loss
    overlong_buffer: int = 0  # tokens
    keep_zero_advantage: bool = False  # trajectories with zero advantage also have a gradient
    num_ranks: int = 1


def build_batch(
    chosen: ChosenBatch, preprocessing: Preprocessing, scores: Mapping[RolloutId, Float32Array] | None = None
) -> TrainingBatch:
    """Build the training batch from the chosen groups: rewards, advantages, loss masks, ranks, packing.

    `scores`: the reference's log-probability of every sampled token, for every rollout that `may_have_gradient` names.
    Trajectories without a gradient are counted but not packed. A trajectory has no gradient if none of its tokens
    carries loss, or if its advantage is zero and `preprocessing.keep_zero_advantage` is off.

    Raises: RecipeError if a rollout is longer than a microbatch.
    """
    index, groups = chosen.index, chosen.groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([rollout.num_sampled for rollout in rollouts], np.int32)
    penalties = _penalties(rollouts, preprocessing)
    rewards = _rewards(rollouts) + penalties
    advantages = _advantages(rewards, [len(group.rollouts) for group in groups], preprocessing)
    scores = scores or {}
    trajectories = [
        trajectory_of(
            rollout,
            float(advantage),
            float(reward),
            _loss_mask(rollout, index, preprocessing),
            scores.get(rollout.rollout_id),
        )
        for rollout, advantage, reward in zip(rollouts, advantages, rewards, strict=True)
    ]
    has_gradient = [
        bool(trajectory.loss_mask.any() and (preprocessing.keep_zero_advantage or trajectory.advantages.any()))
        for trajectory in trajectories
    ]
    microbatches = [
        _pack([trajectories[member] for member in members if has_gradient[member]], preprocessing.max_tokens)
        for members in assign_to_ranks(len(trajectories), preprocessing.num_ranks, index)
    ]
    num_response_tokens = int(lengths.sum())
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
        trained_lengths=lengths,
        has_gradient=np.array(has_gradient, np.bool_),
        generated_lengths=np.array(chosen.generated_lengths, np.int32),
        dropped_lengths=np.array(chosen.dropped_lengths, np.int32),
        metrics={
            **_rollout_metrics(rollouts),
            "reward/length_penalty": float(penalties.mean()),
            "masked_token_fraction": 1 - num_loss_tokens / max(num_response_tokens, 1),
            "without_gradient_fraction": 1 - sum(has_gradient) / len(rollouts),
            "padding_fraction": _padding_fraction([microbatch for local in microbatches for microbatch in local]),
            "dropped/tokens": float(sum(chosen.dropped_lengths)),
            **chosen.metrics,
        },
        actor_state=chosen.actor_state,
    )


def may_have_gradient(group: RolloutGroup, preprocessing: Preprocessing) -> list[Rollout]:
    """Return the rollouts of a finished group that may carry a gradient, whichever batch trains on the group.

    A batch may still mask old tokens. Normalization over the batch may turn an advantage of zero into another value.
    """
    rollouts = group.rollouts
    if preprocessing.keep_zero_advantage or preprocessing.normalize_advantages:
        is_needed = [True] * len(rollouts)
    else:
        rewards = _rewards(rollouts) + _penalties(rollouts, preprocessing)
        is_needed = [bool(each) for each in _advantages(rewards, [len(rollouts)], preprocessing)]
    return [
        rollout
        for rollout, needed in zip(rollouts, is_needed, strict=True)
        if needed and rollout.num_sampled and not _is_masked(rollout, preprocessing)
    ]


def trajectory_of(
    rollout: Rollout, advantage: float, reward: float, carries_loss: BoolArray, scores: Float32Array | None = None
) -> Trajectory:
    """Flat token view of a rollout, with the same advantage for every sampled token that carries loss.

    All other tokens are only context for later tokens. `scores`: the reference's log-probabilities.

    Shapes: carries_loss [number of sampled tokens] bool, scores [number of sampled tokens].
    """
    segments, versions = rollout.segments, rollout.generated.weight_versions
    tokens = GeneratedTokens.joined([segment.tokens for segment in segments])
    sampled = sampled_mask(rollout)
    loss_mask = sampled.copy()
    loss_mask[sampled] = carries_loss
    ref_logprobs = None
    if scores is not None:
        ref_logprobs = np.zeros(len(sampled), np.float32)
        ref_logprobs[loss_mask] = scores[carries_loss]
    return Trajectory(
        rollout_id=rollout.rollout_id,
        token_ids=tokens.token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=tokens.logprobs,
        weight_versions=tokens.weight_versions,
        advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
        reward=reward,
        first_version=int(versions[0]) if len(versions) else 0,  # without tokens the value is never used
        ref_logprobs=ref_logprobs,
    )


def sampled_mask(rollout: Rollout) -> BoolArray:
    """Mask of the sampled tokens among all tokens of a rollout, `[T]`."""
    return np.concatenate([np.full(len(segment), segment.sampled) for segment in rollout.segments])


def _rewards(rollouts: Sequence[Rollout]) -> Float64Array:
    return np.array([rollout.reward for rollout in rollouts], np.float64)


def _penalties(rollouts: Sequence[Rollout], preprocessing: Preprocessing) -> Float64Array:
    lengths = np.array([rollout.num_sampled for rollout in rollouts], np.int32)
    return overlong_penalty(lengths, preprocessing.max_response_tokens, preprocessing.overlong_buffer)


def _advantages(rewards: Float64Array, group_sizes: Sequence[int], preprocessing: Preprocessing) -> Float64Array:
    if preprocessing.advantage is None:
        return np.zeros_like(rewards)
    groups = np.split(rewards, np.cumsum(group_sizes)[:-1])
    advantages = np.concatenate([preprocessing.advantage(group) for group in groups])
    return normalize(advantages) if preprocessing.normalize_advantages else advantages


def _loss_mask(rollout: Rollout, index: int, preprocessing: Preprocessing) -> BoolArray:
    """Mask of the generated tokens that carry loss in batch `index`."""
    if _is_masked(rollout, preprocessing):
        return np.zeros(rollout.num_sampled, np.bool_)
    if preprocessing.mask_older_than is None:
        return np.ones(rollout.num_sampled, np.bool_)
    return rollout.generated.weight_versions >= index - preprocessing.mask_older_than


def _is_masked(rollout: Rollout, preprocessing: Preprocessing) -> bool:
    return preprocessing.mask_truncated and rollout.finish_reason is FinishReason.LENGTH


def _pack(trajectories: Sequence[Trajectory], max_tokens: int) -> list[Microbatch]:
    try:
        return pack(trajectories, max_tokens)
    except ValueError as error:
        raise RecipeError(f"batch.max_tokens = {max_tokens}: {error}") from error


def _lag_histogram(trajectories: Sequence[Trajectory], index: int) -> dict[int, int]:
    """Number of tokens that carry loss by lag (optimizer steps from sampling a token to training on it)."""
    versions = np.concatenate([trajectory.weight_versions[trajectory.loss_mask] for trajectory in trajectories])
    lags, counts = np.unique(index - versions, return_counts=True)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))


def _lag_by_position(rollouts: Sequence[Rollout], index: int) -> Float32Array:
    """Mean lag in each tenth of a response (optimizer steps); NaN for a tenth without tokens."""
    lags = np.concatenate([index - rollout.generated.weight_versions for rollout in rollouts])
    positions = tenths(np.array([rollout.num_sampled for rollout in rollouts]))
    totals = np.bincount(positions, lags, minlength=NUM_POSITIONS)
    counts = np.bincount(positions, minlength=NUM_POSITIONS)
    means = np.full(NUM_POSITIONS, np.nan)
    np.divide(totals, counts, out=means, where=counts > 0)
    return means.astype(np.float32)


def _padding_fraction(microbatches: Sequence[Microbatch]) -> float:
    """Unused share of the microbatches, relative to the fullest one: the waste if ranks wait for each other."""
    lengths = [len(microbatch.token_ids) for microbatch in microbatches]
    return 1 - sum(lengths) / (len(lengths) * max(lengths)) if lengths else 0.0


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [rollout.num_sampled for rollout in rollouts]
    clipped = [rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    # Versions never decrease along a sequence.
    num_versions = [1 + np.count_nonzero(np.diff(rollout.generated.weight_versions)) for rollout in rollouts]
    # The environment's components come first: a component named "mean" must not replace the mean reward.
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
