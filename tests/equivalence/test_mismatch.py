"""Where trainer and engine have the same weights they give the same log-probabilities; any other is noticed."""

from __future__ import annotations

import pytest

from midflight.launch.build import build_trainer
from midflight.metrics.policy import PolicyMetrics
from midflight.testing.fakes import InProcessWeights
from midflight.trainer.inputs import token_origins

from .conftest import RunRecipe

SAME = 1e-4  # nats; float32 in two orders of summation is a tenth of it apart
COMMON = (
    "batch.batch_size=16",
    "batch.group_size=4",
    "trainer.max_steps=12",
    "trainer.learning_rate=1e-3",
    "sampling.max_tokens=60",
)


@pytest.mark.slow
def test_a_run_without_lag_measures_every_token_and_no_mismatch(run_recipe: RunRecipe) -> None:
    run = run_recipe(*COMMON, "schedule.type=conventional")
    for line in run.metrics:
        if "ess" not in line:
            continue  # no rollout of the batch had an advantage
        assert line["mismatch/tokens"] == sum(line["lag/tokens_by_lag"]) == line["lag/tokens_by_lag"][0]
        assert 0 <= line["mismatch/mean"] <= line["mismatch/max"] < SAME
    assert any("ess" in line for line in run.metrics)


@pytest.mark.slow
def test_under_updates_in_flight_what_is_measured_is_no_effect_of_older_keys_and_values(run_recipe: RunRecipe) -> None:
    """Everything that is left of the lags would be far above it: a step moves log-probabilities by more than 0.01."""
    run = run_recipe(*COMMON, "schedule.num_in_flight=24", "schedule.max_lag=2")
    measured = [line for line in run.metrics if "mismatch/max" in line]
    assert measured, "the first batch at least was sampled by the weights it trains"
    assert all(line["mismatch/max"] < SAME for line in measured)
    assert max(line["ratio/max"] for line in run.metrics if "ess" in line) > 1.01


@pytest.mark.slow
def test_a_single_altered_logprob_is_noticed(run_recipe: RunRecipe) -> None:
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
