"""Batches built from graded groups: tokens that carry loss, packed trajectories, counted trajectories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from midflight.errors import RecipeError
from midflight.preprocess.advantages import group_mean, group_mean_std, leave_one_out, no_baseline
from midflight.preprocess.batches import Preprocessing, build_batch
from midflight.preprocess.scoring import GroupScorer, group_to_score
from midflight.tracing.spans import Tracer
from midflight.types import (
    ActorState,
    ChosenBatch,
    FinishReason,
    Float32Array,
    GeneratedTokens,
    GroupId,
    Microbatch,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutId,
    RolloutStatus,
    Segment,
    TrainingBatch,
)

PROMPT = np.array([3, 4], np.int32)
ADVANTAGES = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
}
PLAIN = Preprocessing(group_mean, max_tokens=64, max_response_tokens=16)


def rollout(
    number: int, length: int, reward: float, *, truncated: bool = False, versions: Sequence[int] | None = None
) -> Rollout:
    """Make a rollout whose token ids and log-probabilities identify the rollout and the position."""
    tokens = np.arange(length, dtype=np.int32) + 100 * (number + 1)
    logprobs = -tokens.astype(np.float32) / np.float32(1000)
    generated = GeneratedTokens(tokens, logprobs, np.array(versions or [5] * length, np.int32))
    reason = FinishReason.LENGTH if truncated else FinishReason.STOP
    group_id = GroupId(number // 2)
    return Rollout(
        RolloutId(number),
        group_id,
        RolloutStatus.FINISHED,
        [Segment.given(PROMPT), Segment(generated)],
        reason,
        reward,
    )


def groups_of(*rollouts: Rollout, size: int = 2) -> list[RolloutGroup]:
    return [
        RolloutGroup(GroupId(start // size), Problem("p", "1+1", "2"), list(rollouts[start : start + size]))
        for start in range(0, len(rollouts), size)
    ]


def batch_of(
    groups: list[RolloutGroup],
    index: int = 5,
    scores: dict[RolloutId, Float32Array] | None = None,
    **changes: Any,
) -> TrainingBatch:
    chosen = ChosenBatch(
        index=index, groups=groups, generated_lengths=[1], dropped_lengths=[], metrics={}, actor_state=ActorState()
    )
    return build_batch(chosen, replace(PLAIN, **changes), scores)


def packed(batch: TrainingBatch) -> list[Microbatch]:
    return [microbatch for local in batch.microbatches for microbatch in local]


def loss_tokens(batch: TrainingBatch) -> list[int]:
    """Ids of the tokens that carry loss, sorted."""
    return sorted(
        token for microbatch in packed(batch) for token in microbatch.token_ids[microbatch.loss_mask].tolist()
    )


def assert_finite(batch: TrainingBatch) -> None:
    for microbatch in packed(batch):
        for name in ("behavior_logprobs", "advantages", "rewards"):
            assert np.isfinite(getattr(microbatch, name)).all()
    assert all(np.isfinite(value) for value in batch.metrics.values())


def test_batch_matches_hand_computed_values() -> None:
    batch = batch_of(groups_of(rollout(0, 3, 1.0), rollout(1, 2, 0.0)))
    ((microbatch,),) = batch.microbatches
    # The shared prompt is stored once.
    assert microbatch.token_ids.tolist() == [3, 4, 100, 101, 102, 200, 201]
    assert microbatch.loss_mask.tolist() == [False, False, True, True, True, True, True]
    assert microbatch.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5, -0.5, -0.5]
    np.testing.assert_allclose(microbatch.behavior_logprobs, [0, 0, -0.1, -0.101, -0.102, -0.2, -0.201], rtol=1e-6)
    assert microbatch.rewards.tolist() == [1, 0]
    assert (batch.num_rollouts, batch.num_response_tokens, batch.num_loss_tokens) == (2, 5, 5)
    assert batch.metrics["without_gradient_fraction"] == 0
    assert batch.metrics["masked_token_fraction"] == 0


def test_truncated_responses_carry_no_loss_and_count_in_baselines() -> None:
    groups = groups_of(rollout(0, 4, 0.0, truncated=True), rollout(1, 2, 1.0))
    batch = batch_of(groups, mask_truncated=True)
    assert loss_tokens(batch) == [200, 201]
    assert packed(batch)[0].advantages[-1] == 0.5
    assert (batch.num_rollouts, batch.num_response_tokens, batch.num_loss_tokens) == (2, 6, 2)
    assert batch.metrics["masked_token_fraction"] == pytest.approx(4 / 6)
    assert batch.metrics["without_gradient_fraction"] == 0.5
    assert sum(batch.lag_histogram.values()) == 2
    assert loss_tokens(batch_of(groups)) == [100, 101, 102, 103, 200, 201]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, [104]), (1, [103, 104]), (3, [101, 102, 103, 104]), (4, [100, 101, 102, 103, 104])],
)
def test_tokens_above_the_lag_limit_carry_no_loss(limit: int, expected: list[int]) -> None:
    """Versions 1, 2, 3, 4, 5 have lags 4, 3, 2, 1, 0 in batch 5."""
    groups = groups_of(rollout(0, 5, 1.0, versions=[1, 2, 3, 4, 5]), rollout(1, 1, 0.0, versions=[0]))
    batch = batch_of(groups, mask_older_than=limit)
    assert loss_tokens(batch) == expected
    ((microbatch,),) = batch.microbatches
    # Tokens without loss remain as context for later tokens.
    assert microbatch.token_ids.tolist() == [3, 4, 100, 101, 102, 103, 104]
    assert (microbatch.advantages[~microbatch.loss_mask] == 0).all()
    assert batch.num_loss_tokens == len(expected)
    assert batch.metrics["masked_token_fraction"] == pytest.approx(1 - len(expected) / 6)
    assert batch.lag_histogram == dict.fromkeys(range(limit + 1), 1)


@pytest.mark.parametrize("advantage", [None, *ADVANTAGES.values()], ids=["value", *ADVANTAGES])
@pytest.mark.parametrize("normalize_advantages", [False, True])
def test_empty_response_is_counted_but_not_packed(advantage: Any, normalize_advantages: bool) -> None:
    batch = batch_of(
        groups_of(rollout(0, 0, 1.0), rollout(1, 3, -1.0)),
        advantage=advantage,
        normalize_advantages=normalize_advantages and advantage is not None,
        keep_zero_advantage=True,
        overlong_buffer=4,
    )
    assert loss_tokens(batch) == [200, 201, 202]
    assert [each.rewards.tolist() for each in packed(batch)] == [[-1.0]]
    assert batch.num_rollouts == 2
    assert batch.trained_lengths.tolist() == [0, 3]
    assert batch.has_gradient.tolist() == [False, True]
    assert batch.metrics["without_gradient_fraction"] == 0.5
    assert_finite(batch)


def test_batch_of_empty_responses_has_no_microbatches() -> None:
    batch = batch_of(groups_of(rollout(0, 0, 1.0), rollout(1, 0, 0.0)), keep_zero_advantage=True)
    assert batch.microbatches == [[]]
    assert (batch.num_rollouts, batch.num_response_tokens, batch.num_loss_tokens) == (2, 0, 0)
    assert batch.lag_histogram == {}
    assert_finite(batch)


@pytest.mark.parametrize("name", ["group_mean", "group_mean_std", "leave_one_out"])
@pytest.mark.parametrize("normalize_advantages", [False, True])
def test_equal_rewards_give_a_counted_batch_without_microbatches(name: str, normalize_advantages: bool) -> None:
    """The rewards have no exact float representation and differ between groups."""
    rollouts = [rollout(number, 3, (0.1, 0.7)[number // 3]) for number in range(6)]
    groups = groups_of(*rollouts, size=3)
    settings: dict[str, Any] = {"advantage": ADVANTAGES[name], "normalize_advantages": normalize_advantages}
    batch = batch_of(groups, **settings)
    assert batch.microbatches == [[]]
    assert batch.metrics["without_gradient_fraction"] == 1.0
    assert (batch.num_rollouts, batch.num_response_tokens, batch.num_loss_tokens) == (6, 18, 18)
    assert batch.group_ids == [0, 1]
    assert_finite(batch)
    kept = batch_of(groups, keep_zero_advantage=True, **settings)
    assert len(loss_tokens(kept)) == 18
    assert kept.metrics["without_gradient_fraction"] == 0
    assert not any(each.advantages.any() for each in packed(kept))


def test_normalization_gives_no_gradient_to_groups_of_equal_rewards() -> None:
    """The other group's advantages, 5/6 and five times -1/6, do not add up to zero in floating point."""
    rollouts = [rollout(number, 2, reward) for number, reward in enumerate([1] + [0] * 5 + [1] * 6)]
    batch = batch_of(groups_of(*rollouts, size=6), normalize_advantages=True)
    assert loss_tokens(batch) == [100, 101, 200, 201, 300, 301, 400, 401, 500, 501, 600, 601]
    assert batch.metrics["without_gradient_fraction"] == 0.5
    # Over the batch, the mean is 0 and the standard deviation is sqrt((25 + 5) / 36 / 12) = sqrt(5 / 72).
    advantages = sorted({value for microbatch in packed(batch) for value in microbatch.advantages.tolist()})
    deviation = (5 / 72) ** 0.5 + 1e-4
    np.testing.assert_allclose(advantages, [-1 / 6 / deviation, 0, 5 / 6 / deviation], rtol=1e-6, atol=1e-12)


def test_batch_has_no_advantages_with_a_value_function() -> None:
    batch = batch_of(groups_of(rollout(0, 2, 1.0), rollout(1, 2, 0.0)), advantage=None, keep_zero_advantage=True)
    assert not packed(batch)[0].advantages.any()
    assert packed(batch)[0].rewards.tolist() == [1, 0]


def test_length_penalty_is_part_of_the_reward() -> None:
    """Responses of 16 and 14 tokens get -1 and -0.5: the limit is 16, and the penalty begins 4 tokens before."""
    batch = batch_of(groups_of(rollout(0, 16, 1.0), rollout(1, 14, 1.0)), overlong_buffer=4)
    (microbatch,) = packed(batch)
    assert sorted(microbatch.rewards.tolist()) == [0, 0.5]
    assert sorted(set(microbatch.advantages.tolist())) == [-0.25, 0, 0.25]
    assert batch.metrics["reward/length_penalty"] == pytest.approx(-0.75)
    assert batch.metrics["reward/mean"] == 1


def test_rollout_longer_than_a_microbatch_names_the_recipe_key() -> None:
    groups = groups_of(rollout(0, 9, 1.0), rollout(1, 2, 0.0))
    assert packed(batch_of(groups, max_tokens=11))
    with pytest.raises(RecipeError, match=r"batch\.max_tokens = 10: a sequence of 11 tokens"):
        batch_of(groups, max_tokens=10)


class TokenIdReference:
    """Reference whose log-probability is the negative token id."""

    def logprobs(self, microbatch: Microbatch) -> Float32Array:
        return np.where(microbatch.loss_mask, -microbatch.token_ids, 0).astype(np.float32)


def scores_of(groups: list[RolloutGroup], **changes: Any) -> dict[RolloutId, Float32Array]:
    scorer = GroupScorer(TokenIdReference(), max_tokens=12, tracer=Tracer(None, "test"))
    scores: dict[RolloutId, Float32Array] = {}
    for group in groups:
        unscored = group_to_score(group, replace(PLAIN, **changes))
        scores |= zip((each.rollout_id for each in unscored.sequences), scorer.score(unscored).logprobs, strict=True)
    return scores


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask_older_than": 0},
        {"mask_truncated": True},
        {"normalize_advantages": True, "advantage": no_baseline},
        {"keep_zero_advantage": True, "advantage": None},
        {"overlong_buffer": 15},
    ],
)
def test_every_packed_rollout_has_its_scores(changes: dict[str, Any]) -> None:
    groups = groups_of(
        *(rollout(number, 3 + number, number % 2) for number in range(6)),
        rollout(6, 4, 1),
        rollout(7, 3, 1, versions=[4, 5, 5], truncated=True),
    )
    batch = batch_of(groups, max_tokens=12, scores=scores_of(groups, **changes), **changes)
    assert len(packed(batch)) > 1
    for microbatch in packed(batch):
        assert microbatch.ref_logprobs is not None
        expected = np.where(microbatch.loss_mask, -microbatch.token_ids, 0)
        np.testing.assert_array_equal(microbatch.ref_logprobs, expected)
    assert all(each.ref_logprobs is None for each in packed(batch_of(groups, **changes)))


def test_rollouts_without_a_gradient_are_not_scored() -> None:
    groups = groups_of(rollout(0, 3, 1), rollout(1, 4, 1), rollout(2, 3, 0), rollout(3, 3, 1, truncated=True))
    assert not scores_of(groups[:1])
    assert scores_of(groups, mask_truncated=True).keys() == {2}
    assert scores_of(groups, normalize_advantages=True).keys() == {0, 1, 2, 3}


def test_two_ranks_divide_all_trajectories_of_one_batch() -> None:
    rollouts = [rollout(number, 1 + number, number % 2) for number in range(8)]
    build = functools.partial(batch_of, groups_of(*rollouts), max_tokens=16)
    single, divided = build(num_ranks=1), build(num_ranks=2)
    assert len(divided.microbatches) == 2
    assert (
        loss_tokens(divided)
        == loss_tokens(single)
        == sorted(token for member in rollouts for token in member.generated.token_ids.tolist())
    )
    assert [sum(len(microbatch.rewards) for microbatch in local) for local in divided.microbatches] == [4, 4]
    for name in ("num_rollouts", "num_response_tokens", "num_loss_tokens", "lag_histogram"):
        assert getattr(divided, name) == getattr(single, name)


def test_assignment_to_ranks_does_not_depend_on_response_lengths() -> None:
    """The rank of a rollout is fixed before generation."""
    short = [rollout(number, 1, number % 2) for number in range(8)]
    mixed = [rollout(number, 1 + number, number % 2) for number in range(8)]

    def members(rollouts: list[Rollout]) -> list[set[int]]:
        return [
            {int(token) // 100 for microbatch in local for token in microbatch.token_ids[microbatch.loss_mask]}
            for local in batch_of(groups_of(*rollouts), num_ranks=2).microbatches
        ]

    assert members(short) == members(mixed)
