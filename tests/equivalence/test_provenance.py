"""Check of the id, behavior log-probability and weight version that every trained token carries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from midflight.models.attention import PackedSequences
from midflight.models.loading import load_model
from midflight.types import Microbatch

from .conftest import RunRecipe


def logprobs_under(model: torch.nn.Module, weights: dict[str, torch.Tensor], microbatch: Microbatch) -> np.ndarray:
    """Log-probability of every token of the microbatch, with a fresh key-value cache of these weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        token_ids = torch.tensor(microbatch.token_ids).long()
        packed = PackedSequences.of(microbatch)
        positions = torch.tensor(microbatch.position_ids).long()
        logits = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, packed=packed).logits
        logprobs = torch.log_softmax(logits[0, packed.previous_index], -1).gather(1, token_ids[:, None])
    return logprobs.squeeze(1).numpy()


@pytest.mark.parametrize("task", ["chain_sums", "running_sums"])
def test_trained_tokens_carry_the_logprobs_and_versions_of_their_weights(run_recipe: RunRecipe, task: str) -> None:
    run = run_recipe(
        *("trainer.max_steps=12", "batch.batch_size=16", "schedule.num_in_flight=32", "trainer.learning_rate=1e-3"),
        f"task.type={task}",
    )
    model = load_model(run.recipe.model.path)
    num_checked = num_mixed = num_turns = 0
    for batch in run.batches[:12]:
        for microbatch in batch.microbatches[0]:
            starts = np.concatenate([[0], np.cumsum(microbatch.sequence_lengths)])
            by_version = {
                version: logprobs_under(model, run.weights.sent[version], microbatch)
                for version in np.unique(microbatch.weight_versions[microbatch.loss_mask]).tolist()
            }
            for start, end in itertools.pairwise(starts):
                tokens = np.arange(start, end)[microbatch.loss_mask[start:end]]
                versions = microbatch.weight_versions[tokens]
                assert (np.diff(versions) >= 0).all()
                num_mixed += bool(versions[0] != versions[-1])
                num_turns += int(np.count_nonzero(np.diff(tokens) > 1))
                # Before its first update a sequence has keys and values of one version: a plain forward pass matches.
                unmixed = tokens[versions == versions[0]]
                np.testing.assert_allclose(
                    microbatch.behavior_logprobs[unmixed], by_version[int(versions[0])][unmixed], atol=1e-4
                )
                num_checked += len(unmixed)
    assert num_checked > 500
    assert (num_turns > 0) == (task == "running_sums")
    assert num_mixed > 0, "no rollout was in flight during an update: the run proves nothing"
    assert max(line["versions_per_rollout/max"] for line in run.metrics) > 1


def test_run_metrics_match_the_batches(run_recipe: RunRecipe) -> None:
    run = run_recipe("trainer.max_steps=6", "batch.batch_size=16", "schedule.num_in_flight=32")
    assert [line["version"] for line in run.metrics] == list(range(1, 7))
    for line, batch in zip(run.metrics, run.batches, strict=False):
        lags = np.repeat(list(batch.lag_histogram), list(batch.lag_histogram.values()))
        assert line["lag/mean"] == np.mean(lags)
        assert line["lag/max"] == lags.max()
        assert len(lags) == batch.num_response_tokens
        assert 0 < line["ess"] <= 1
    state = run.actor
    waiting = sum(len(batch.group_ids) for batch in run.batches[6:])
    assert state.next_group_id == run.trainer.trained_groups + waiting + len(state.open_group_ids)
