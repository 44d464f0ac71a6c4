"""Trainer and engine agree on log-probabilities under the same weights; the mismatch metric shows any difference."""

from __future__ import annotations

import pytest

from midflight.launch.build import build_trainer
from midflight.metrics.policy import PolicyMetrics
from midflight.testing.fakes import InProcessWeights
from midflight.trainer.inputs import token_origins

from .conftest import RunRecipe

SAME = 1e-4  # nats; ten times the difference between two summation orders in float32
COMMON = (
    "batch.batch_size=16",
    "batch.group_size=4",
    "trainer.max_steps=12",
    "trainer.learning_rate=1e-3",
    "sampling.max_tokens=60",
)


@pytest.mark.slow
def test_without_lag_every_token_is_measured_without_mismatch(run_recipe: RunRecipe) -> None:
    run = run_recipe(*COMMON, "schedule.type=conventional")
    for line in run.metrics:
        if "ess" not in line:
            continue  # every advantage of the batch is 0
        assert line["mismatch/tokens"] == sum(line["lag/tokens_by_lag"]) == line["lag/tokens_by_lag"][0]
        assert 0 <= line["mismatch/mean"] <= line["mismatch/max"] < SAME
    assert any("ess" in line for line in run.metrics)


@pytest.mark.slow
def test_updates_in_flight_add_no_measured_mismatch(run_recipe: RunRecipe) -> None:
    """A token with lag in the measurement would exceed the limit: a step moves log-probabilities by more than 0.01."""
    run = run_recipe(*COMMON, "schedule.num_in_flight=24", "schedule.max_lag=2")
    measured = [line for line in run.metrics if "mismatch/max" in line]
    assert measured, "at least the first batch is sampled by the weights it trains"
    assert all(line["mismatch/max"] < SAME for line in measured)
    assert max(line["ratio/max"] for line in run.metrics if "ess" in line) > 1.01


@pytest.mark.slow
def test_one_altered_logprob_is_detected(run_recipe: RunRecipe) -> None:
    run = run_recipe(*COMMON, "trainer.max_steps=1", "schedule.type=conventional")
    batch = run.batches[0]
    backend = build_trainer(run.recipe, InProcessWeights())
    backend.init(rank=0)
    (microbatch,) = batch.microbatches[0]
    outputs = backend.forward(microbatch)
    for error in (0.0, 1e-3):
        altered = outputs.logprobs.new_tensor(microbatch.behavior_logprobs[microbatch.loss_mask])
        altered[len(altered) // 2] += error
        metrics = PolicyMetrics(max_ratio=5.0)
        metrics.add(token_origins(microbatch, batch.index), outputs.logprobs, altered, outputs.entropy)
        largest = metrics.result()["mismatch/max"]
        assert isinstance(largest, float)
        assert (largest < SAME) == (not error)
