"""Preprocessing in a process of its own and in that of the rollouts are the same run, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from midflight.streams.codec import Codec
from midflight.types import TrainingBatch

from .conftest import RunRecipe

NUM_STEPS = 4
OF_A_CLOCK = ("time/", "idle/", "throughput/", "update/")
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
    metrics = {name: value for name, value in batch.metrics.items() if not name.startswith(OF_A_CLOCK)}
    return Codec(TrainingBatch).encode(replace(batch, metrics=metrics))


@pytest.mark.parametrize("steps_per_rl_step", [1, 2])
def test_batches_and_weights_are_the_same_wherever_batches_are_made(
    run_recipe: RunRecipe, steps_per_rl_step: int
) -> None:
    schedule = f"schedule.steps_per_rl_step={steps_per_rl_step}"
    within = run_recipe(*RECIPE, schedule)
    apart = run_recipe(*RECIPE, schedule, "preprocess.process=own")
    assert all(each.ref_logprobs is not None for batch in within.batches for each in batch.microbatches[0])
    expected = [message(batch) for batch in within.batches[:NUM_STEPS]]
    assert [message(batch) for batch in apart.batches[:NUM_STEPS]] == expected
    first, last = within.weights.sent[0], within.weights.sent[NUM_STEPS]
    assert any(not torch.equal(last[name], first[name]) for name in last), "nothing was learned"
    for name, tensor in last.items():
        assert torch.equal(apart.weights.sent[NUM_STEPS][name], tensor), name
    for run in (within, apart):
        assert all(line["time/preprocess_s"] > 0 for line in run.metrics)
