"""The batches that training speed is measured on, and the arithmetic one optimizer step on them needs at least."""

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
    """Rollouts of one optimizer step. Units: tokens. Responses are log-normal, cut to 1 to `max_response`."""

    sequences: int
    group_size: int  # rollouts with the same prompt
    prompt_tokens: int
    median_response: float
    max_response: int
    sigma: float = 0.9


# The demo's rollouts share prompts, as in its recipe. The larger model's do not, so that the comparison is between
# ways to compute the same tokens.
DEMO_LOAD = LoadShape(sequences=32, group_size=8, prompt_tokens=12, median_response=24, max_response=160)
LONG_LOAD = LoadShape(sequences=32, group_size=1, prompt_tokens=64, median_response=128, max_response=1024)


def load_shape(model: str, sequences: int, group_size: int) -> LoadShape:
    """The load for a model by its name; `group_size` 0: the load's own."""
    load = DEMO_LOAD if model == "demo" else LONG_LOAD
    return replace(load, sequences=sequences, group_size=group_size or load.group_size)


def make_trajectories(shape: LoadShape, vocab_size: int, seed: int) -> list[Trajectory]:
    """Random tokens and advantages, with behavior log-probabilities that are still to be filled in."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(shape.median_response), shape.sigma, shape.sequences)
    made: list[Trajectory] = []
    for number, length in enumerate(lengths.clip(1, shape.max_response).astype(int)):
        if number % shape.group_size == 0:
            prompt = rng.integers(0, vocab_size, shape.prompt_tokens, np.int32)
        token_ids = np.concatenate([prompt, rng.integers(0, vocab_size, length, np.int32)])
        mask = np.arange(len(token_ids)) >= shape.prompt_tokens
        logprobs = np.zeros(len(token_ids), np.float32)
        advantages = np.where(mask, rng.normal(), 0).astype(np.float32)
        versions = np.zeros(len(token_ids), np.int32)
        made.append(
            Trajectory(RolloutId(number), token_ids, mask, logprobs, versions, advantages, reward=0.0, first_version=0)
        )
    return made


def on_policy(trajectories: Sequence[Trajectory], model: Path) -> list[Trajectory]:
    """With the model's own log-probabilities as those of the behavior policy.

    Any others would give ratios of e-20, and gradients so small that the processor computes them many times slower.
    """
    policy = FrozenReference(model, temperature=1.0)
    return [
        replace(each, behavior_logprobs=policy.logprobs(pack([each], len(each.token_ids))[0])) for each in trajectories
    ]


def natural_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of sequences in their order: as many rows as fit `max_tokens` when all are padded to the longest."""
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
    """The share of the rows' cells that hold no token, when each batch is padded to its longest sequence."""
    cells = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1 - sum(lengths[row] for rows in batches for row in rows) / cells


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What decides a step's arithmetic."""

    body_parameters: int  # of the matrices every token is multiplied with
    head_parameters: int  # of the output head, for tokens that carry loss only
    attention_width: int  # query heads times their dimension, added up over layers

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """`model`: a Hugging Face causal language model."""
        config, head = model.config, model.get_output_embeddings().weight
        tables = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
        matrices = [each for each in model.base_model.parameters() if each.dim() == 2 and id(each) not in tables]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_hidden_layers * config.num_attention_heads * head_dim
        return cls(sum(each.numel() for each in matrices if each is not head), head.numel(), width)


def useful_flops(sizes: ModelSizes, microbatches: Sequence[Microbatch]) -> float:
    """What one optimizer step on packed microbatches has to multiply and add, forward and backward.

    6 * body parameters * tokens + 6 * head parameters * loss tokens + 12 * attention width * causal pairs

    A multiplication and an addition count as 2; a matrix is used once forward and twice backward. A pair is a token
    and one it sees, itself included: its score and its value's share are 4 operations per dimension forward, 8
    backward. Nothing is credited for computing something again, for padding, or for what is not a matrix product.
    """
    tokens = sum(len(each.token_ids) for each in microbatches)
    loss_tokens = sum(int(each.loss_mask.sum()) for each in microbatches)
    pairs = sum(int((each.position_ids.astype(np.int64) + 1).sum()) for each in microbatches)
    return (
        6.0 * sizes.body_parameters * tokens
        + 6.0 * sizes.head_parameters * loss_tokens
        + 12.0 * sizes.attention_width * pairs
    )
