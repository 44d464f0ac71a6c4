"""Batches for measuring training speed, and the arithmetic that one optimizer step on them needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midflight.preprocess.packing import pack
from midflight.preprocess.reference import FrozenReference
from midflight.types import Microbatch, RolloutId, Trajectory


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Rollouts of one optimizer step. Response lengths are log-normal, 1 to `max_response`. Units: tokens."""

    sequences: int
    group_size: int  # rollouts with the same prompt
    prompt_tokens: int
    median_response: float
    max_response: int
    sigma: float = 0.9


# The demo's rollouts share prompts, as in its recipe. The larger model's rollouts do not, so that both steps compute
# the same tokens.
DEMO_LOAD = LoadShape(sequences=32, group_size=8, prompt_tokens=12, median_response=24, max_response=160)
LONG_LOAD = LoadShape(sequences=32, group_size=1, prompt_tokens=64, median_response=128, max_response=1024)


def load_shape(model: str, sequences: int, group_size: int) -> LoadShape:
    """Return the load for a model by its name; `group_size` 0 keeps the load's own group size."""
    load = DEMO_LOAD if model == "demo" else LONG_LOAD
    return replace(load, sequences=sequences, group_size=group_size or load.group_size)


def make_trajectories(shape: LoadShape, vocab_size: int, seed: int) -> list[Trajectory]:
    """Make rollouts with random tokens and advantages; behavior log-probabilities are 0, see `on_policy`."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(shape.median_response), shape.sigma, shape.sequences)
    trajectories: list[Trajectory] = []
    for number, length in enumerate(lengths.clip(1, shape.max_response).astype(int)):
        if number % shape.group_size == 0:
            prompt = rng.integers(0, vocab_size, shape.prompt_tokens, np.int32)
        token_ids = np.concatenate([prompt, rng.integers(0, vocab_size, length, np.int32)])
        mask = np.arange(len(token_ids)) >= shape.prompt_tokens
        logprobs = np.zeros(len(token_ids), np.float32)
        advantages = np.where(mask, rng.normal(), 0).astype(np.float32)
        versions = np.zeros(len(token_ids), np.int32)
        trajectories.append(
            Trajectory(RolloutId(number), token_ids, mask, logprobs, versions, advantages, reward=0.0, first_version=0)
        )
    return trajectories


def on_policy(trajectories: Sequence[Trajectory], model: Path, device: str = "cpu") -> list[Trajectory]:
    """Set the behavior log-probabilities to the model's own.

    Other values would give ratios of e-20, and gradients so small that the processor computes them many times slower.
    """
    policy = FrozenReference(model, temperature=1.0, device=device)
    return [
        replace(trajectory, behavior_logprobs=policy.logprobs(pack([trajectory], len(trajectory.token_ids))[0]))
        for trajectory in trajectories
    ]


def natural_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split sequences in order into batches that fit `max_tokens` if padded to the longest row; yield their indices."""
    rows: list[int] = []
    for index, length in enumerate(lengths):
        longest = max([length, *(lengths[row] for row in rows)])
        if rows and (len(rows) + 1) * longest > max_tokens:
            yield rows
            rows = []
        rows.append(index)
    if rows:
        yield rows


def padding_fraction(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of cells without a token if each batch is padded to its longest sequence."""
    cells = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1 - sum(lengths[row] for rows in batches for row in rows) / cells


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model that determine a step's arithmetic."""

    body_parameters: int  # of the matrices that multiply every token
    head_parameters: int  # of the output head, which multiplies tokens with a loss only
    attention_width: int  # query heads times head dimension, summed over layers

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """Read the sizes of a Hugging Face causal language model."""
        config, head = model.config, model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        matrices = [
            matrix for matrix in model.base_model.parameters() if matrix.dim() == 2 and id(matrix) not in tables
        ]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_hidden_layers * config.num_attention_heads * head_dim
        return cls(sum(matrix.numel() for matrix in matrices if matrix is not head), head.numel(), width)


def useful_flops(sizes: ModelSizes, microbatches: Sequence[Microbatch]) -> float:
    """Floating-point operations that one optimizer step on packed microbatches needs, forward and backward:

    6 * body parameters * tokens + 6 * head parameters * loss tokens + 12 * attention width * causal pairs

    A multiplication and an addition count as 2 operations; a matrix is used once forward and twice backward. A causal
    pair is a token and a token that it attends to, itself included. Its score and its share of the value take 4
    operations per dimension forward and 8 backward. Recomputation, padding and operations other than matrix products do
    not count.
    """
    tokens = sum(len(microbatch.token_ids) for microbatch in microbatches)
    loss_tokens = sum(int(microbatch.loss_mask.sum()) for microbatch in microbatches)
    pairs = sum(int((microbatch.position_ids.astype(np.int64) + 1).sum()) for microbatch in microbatches)
    return (
        6.0 * sizes.body_parameters * tokens
        + 6.0 * sizes.head_parameters * loss_tokens
        + 12.0 * sizes.attention_width * pairs
    )
