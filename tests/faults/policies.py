"""Sampled tokens against the trainer's checkpoints: an engine with torn or wrong weights gives other probabilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from faults.runs import batches_of
from midflight.config.run_directory import RunDirectory
from midflight.trainer.checkpoints import checkpoint_of
from midflight.types import TrainingBatch

SEQUENCES_PER_VERSION = 8
TOLERANCE = 1e-3  # nats

Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]


def check_policies(run: RunDirectory) -> int:
    """Compare sampled log-probabilities with those of the checkpoint of their version; return the number of sequences.

    Only sequences of a single version are compared: others have keys and values of older weights in their cache.
    """
    by_version: defaultdict[int, list[Arrays]] = defaultdict(list)
    for batch in batches_of(run).values():
        for version, arrays in sequences_of_one_version(batch):
            if len(by_version[version]) < SEQUENCES_PER_VERSION:
                by_version[version].append(arrays)
    num_compared = 0
    for version, sequences in by_version.items():
        checkpoint = checkpoint_of(run.checkpoints, version)
        if not checkpoint.exists():
            continue
        num_compared += len(sequences)
        # Another implementation than the engine's and the trainer's.
        model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
        for token_ids, positions, behavior_logprobs in sequences:
            np.testing.assert_allclose(
                logprobs_of(model, token_ids)[positions],
                behavior_logprobs,
                atol=TOLERANCE,
                err_msg=f"tokens of version {version} were not sampled with the weights of {checkpoint.name}",
            )
    return num_compared


def sequences_of_one_version(batch: TrainingBatch) -> Iterator[tuple[int, Arrays]]:
    """Yield version, token ids with the prompt, positions of the sampled tokens, and their log-probabilities."""
    for microbatch in (each for share in batch.microbatches for each in share):
        for prefix, own in microbatch.sequence_positions():
            sampled = microbatch.loss_mask[own]
            versions = set(microbatch.weight_versions[own][sampled].tolist())
            if len(versions) == 1:
                token_ids = microbatch.token_ids[np.concatenate([prefix, own])].astype(np.int64)
                positions = len(prefix) + np.flatnonzero(sampled)
                yield versions.pop(), (token_ids, positions, microbatch.behavior_logprobs[own][sampled])


def logprobs_of(model: Any, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Log-probability of every token but the first, which gets 0."""
    ids = torch.from_numpy(token_ids)
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
    found = torch.cat([torch.zeros(1), logprobs[:-1].gather(1, ids[1:, None])[:, 0]])
    array: npt.NDArray[np.float32] = found.numpy()
    return array
