"""Preprocessing in its own process and in the rollout process give the same run, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from midflight.streams.codec import Codec
from midflight.types import TrainingBatch

from .conftest import RunRecipe

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


@pytest.mark.parametrize("steps_per_rl_step", [1, 2])
def test_a_preprocess_process_changes_no_batch_or_weight(run_recipe: RunRecipe, steps_per_rl_step: int) -> None:
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
