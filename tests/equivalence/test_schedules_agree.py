"""Schedules that must be the same run: pipeline with max_lag = 0 is conventional RL with one step per RL step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

COMMON = ("batch.batch_size=16", "batch.group_size=4", "trainer.max_steps=8", "sampling.max_tokens=60")


def test_pipeline_without_lag_is_conventional_bit_for_bit(run_recipe: Callable) -> None:
    conventional = run_recipe(*COMMON, "schedule.type=conventional")
    pipeline = run_recipe(*COMMON, "schedule.num_in_flight=16", "schedule.max_lag=0")
    for expected, batch in zip(conventional.batches[:8], pipeline.batches[:8], strict=True):
        assert batch.group_ids == expected.group_ids
        assert len(batch.microbatches) == len(expected.microbatches)
        for ours, theirs in zip(batch.microbatches, expected.microbatches, strict=True):
            np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(ours.behavior_logprobs, theirs.behavior_logprobs)
    last, expected_last = pipeline.weights.sent[8], conventional.weights.sent[8]
    assert any(not torch.equal(last[name], pipeline.weights.sent[0][name]) for name in last), "nothing was learned"
    for name, tensor in expected_last.items():
        assert torch.equal(last[name], tensor), name
    assert pipeline.trainer.lag_histogram.keys() == {0}


def test_the_bounds_hold_in_the_real_loops(run_recipe: Callable) -> None:
    bounded = run_recipe(*COMMON, "schedule.num_in_flight=24", "schedule.max_lag=2")
    assert max(bounded.trainer.lag_histogram) <= 2
    conventional = run_recipe(*COMMON, "schedule.type=conventional", "schedule.steps_per_rl_step=4")
    assert sorted(conventional.trainer.lag_histogram) == [0, 1, 2, 3]
