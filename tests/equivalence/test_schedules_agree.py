"""Schedules that must give the same run: without lag, each equals conventional RL with one step per RL step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .conftest import RunRecipe

NUM_STEPS = 20
COMMON = (
    "batch.batch_size=16",
    "batch.group_size=4",
    f"trainer.max_steps={NUM_STEPS}",
    "trainer.learning_rate=1e-3",
    "sampling.max_tokens=60",
)
WITHOUT_LAG = {
    "pipeline": ("schedule.num_in_flight=16", "schedule.max_lag=0"),
    "bounded": ("schedule.type=bounded", "schedule.max_lag=0"),
    "bounded at the boundary": ("schedule.type=bounded", "schedule.max_lag=0", "schedule.updates=boundary"),
    "april": ("schedule.type=april", "schedule.over_sampling=1"),
}


@pytest.mark.slow
def test_without_lag_all_schedules_match_conventional_rl(run_recipe: RunRecipe) -> None:
    conventional = run_recipe(*COMMON, "schedule.type=conventional")
    first, last = conventional.weights.sent[0], conventional.weights.sent[NUM_STEPS]
    assert any(not torch.equal(last[name], first[name]) for name in last), "nothing was learned"
    for schedule, overrides in WITHOUT_LAG.items():
        run = run_recipe(*COMMON, *overrides)
        for expected, batch in zip(conventional.batches[:NUM_STEPS], run.batches[:NUM_STEPS], strict=True):
            assert batch.group_ids == expected.group_ids, schedule
            assert len(batch.microbatches[0]) == len(expected.microbatches[0])
            for ours, theirs in zip(batch.microbatches[0], expected.microbatches[0], strict=True):
                np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
                np.testing.assert_array_equal(ours.behavior_logprobs, theirs.behavior_logprobs)
                np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        for name, tensor in last.items():
            assert torch.equal(run.weights.sent[NUM_STEPS][name], tensor), (schedule, name)
        assert run.trainer.lag_histogram.keys() == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "overrides"),
    [
        (2, ("schedule.num_in_flight=24", "schedule.max_lag=2")),
        (3, ("schedule.type=conventional", "schedule.steps_per_rl_step=4")),
        (2, ("schedule.type=bounded", "schedule.max_lag=2")),
        (1, ("schedule.type=one_step_off",)),
        (1, ("schedule.type=april", "batch.mask_older_than=1")),
    ],
)
def test_lag_bounds_hold_in_the_real_loops(run_recipe: RunRecipe, bound: int, overrides: tuple[str, ...]) -> None:
    run = run_recipe(*COMMON, *overrides)
    assert max(run.trainer.lag_histogram) == bound


def test_tokens_over_the_age_limit_carry_no_loss(run_recipe: RunRecipe) -> None:
    common = (*COMMON, "schedule.type=april", "schedule.over_sampling=3", "trainer.max_steps=8")
    masked = run_recipe(*common, "batch.mask_older_than=0")
    num_masked = 0
    for batch in masked.batches:
        assert batch.lag_histogram.keys() <= {0}
        assert batch.num_loss_tokens == sum(batch.lag_histogram.values())
        num_masked += batch.num_response_tokens - batch.num_loss_tokens
        for microbatch in batch.microbatches[0]:
            assert (microbatch.weight_versions[microbatch.loss_mask] == batch.index).all()
            assert not microbatch.advantages[~microbatch.loss_mask].any()
    assert num_masked > 0, "no rollout was carried over: the run proves nothing"


@pytest.mark.slow
def test_april_resumes_aborted_rollouts(run_recipe: RunRecipe) -> None:
    run = run_recipe(*COMMON, "schedule.type=april", "schedule.over_sampling=2", "trainer.max_steps=10")
    assert run.actor.num_aborted > 0
    assert max(line["versions_per_rollout/max"] for line in run.metrics) > 1
    assert max(line["carried_token_fraction"] for line in run.metrics) > 0
    bounded = run_recipe(
        *COMMON,
        "schedule.type=april",
        "schedule.over_sampling=2",
        "schedule.max_versions=2",
        "trainer.max_steps=10",
    )
    assert max(line["versions_per_rollout/max"] for line in bounded.metrics) == 2


def test_dynamic_sampling_drops_groups_without_signal(run_recipe: RunRecipe) -> None:
    run = run_recipe(*COMMON, "batch.dynamic_sampling=true", "trainer.max_steps=6", "schedule.num_in_flight=24")
    assert run.actor.num_filtered_groups > 0
    for batch in run.batches:
        num_sequences = sum(len(microbatch.sequence_lengths) for microbatch in batch.microbatches[0])
        assert num_sequences == batch.num_rollouts, "a trajectory without a gradient was trained on"
    filtered = sum(line["dropped/filtered_groups"] for line in run.metrics)
    assert 0 < filtered <= run.actor.num_filtered_groups
