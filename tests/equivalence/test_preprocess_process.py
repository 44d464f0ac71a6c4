"""Preprocessing in the rollout process, and by any number of processes, gives the same run, bit for bit.

The scores of the reference equal those of a forward pass over the packed batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from midflight.launch.build import build_reference
from midflight.streams.codec import Codec
from midflight.types import TrainingBatch

from .conftest import FinishedRun, RunRecipe

NUM_STEPS = 4
CLOCK_METRICS = ("time/", "idle/", "throughput/", "update/")
RECIPE = (
    "schedule.type=conventional",
    "batch.batch_size=16",
    "batch.group_size=4",
    f"trainer.max_steps={NUM_STEPS}",
    "trainer.learning_rate=1e-3",
    "sampling.max_tokens=60",
    "loss.type=reinforce",
    "loss.kl_coefficient=0.01",
)


def message(batch: TrainingBatch) -> bytes:
    metrics = {name: value for name, value in batch.metrics.items() if not name.startswith(CLOCK_METRICS)}
    return Codec(TrainingBatch).encode(replace(batch, metrics=metrics))


def assert_equal_runs(run: FinishedRun, expected: FinishedRun) -> None:
    messages = [message(batch) for batch in run.batches[:NUM_STEPS]]
    assert messages == [message(batch) for batch in expected.batches[:NUM_STEPS]]
    first, last = expected.weights.sent[0], expected.weights.sent[NUM_STEPS]
    assert any(not torch.equal(last[name], first[name]) for name in last), "nothing was learned"
    for name, tensor in last.items():
        assert torch.equal(run.weights.sent[NUM_STEPS][name], tensor), name
    assert all(line["time/preprocess_s"] > 0 for line in run.metrics)


@pytest.mark.parametrize("steps_per_rl_step", [1, 2])
def test_workers_change_no_batch_or_weight(run_recipe: RunRecipe, steps_per_rl_step: int) -> None:
    schedule = f"schedule.steps_per_rl_step={steps_per_rl_step}"
    at_once = run_recipe(*RECIPE, schedule, "preprocess.num_workers=0")
    for num_workers in (1, 2, 3)[:: 3 - steps_per_rl_step]:
        assert_equal_runs(run_recipe(*RECIPE, schedule, f"preprocess.num_workers={num_workers}"), at_once)


def test_scores_equal_a_forward_pass_of_the_batch(run_recipe: RunRecipe) -> None:
    run = run_recipe(*RECIPE, "batch.mask_older_than=0", "schedule.steps_per_rl_step=2")
    reference = build_reference(run.recipe)
    microbatches = [each for batch in run.batches[:NUM_STEPS] for each in batch.microbatches[0]]
    assert any((each.prefix_lengths > 0).any() for each in microbatches)
    for microbatch in microbatches:
        assert microbatch.ref_logprobs is not None
        np.testing.assert_allclose(microbatch.ref_logprobs, reference.logprobs(microbatch), atol=1e-4)
        assert not microbatch.ref_logprobs[~microbatch.loss_mask].any()
