"""Attention over packed sequences, plugged into any Hugging Face model through transformers' AttentionInterface.

A microbatch is one row of T tokens: several sequences, concatenated. All layers except attention work on these tokens.
Attention works on padded rows, one row per sequence, with sequences of similar length in one bucket. No sequence
therefore sees another sequence, and the fused causal kernel runs (forward and backward).

Suffixes: T packed tokens, S sequences of one bucket, L longest of them, H heads, K key/value heads, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from midflight.types import Int64Array, Microbatch

PACKED_ATTENTION = "midflight_packed"
# Bucket boundaries grow by this factor: at most a quarter of a padded row is padding.
_BUCKET_GROWTH = 4 / 3


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, as rows padded to the longest sequence."""

    packed_index: Tensor  # int64 [S * L]: packed token at each place; any token for padding
    num_sequences: int
    max_length: int


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Layout of one microbatch, computed once and used by every layer."""

    buckets: tuple[Bucket, ...]
    padded_index: Tensor  # int64 [T]: place of each packed token's result in the rows of all buckets
    previous_index: Tensor  # int64 [T]: the packed token before each one; -1 for the first of a trajectory

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device | str = "cpu") -> PackedSequences:
        num_tokens = len(microbatch.token_ids)
        padded_index, previous_index = np.empty(num_tokens, np.int64), np.full(num_tokens, -1, np.int64)
        buckets: list[Bucket] = []
        num_padded = 0
        for members in _by_similar_length(microbatch.sequence_positions()):
            max_length = max(len(prefix) + len(own) for prefix, own in members)
            rows = np.zeros((len(members), max_length), np.int64)
            for row, (prefix, own) in enumerate(members):
                sequence = np.concatenate([prefix, own])
                rows[row, : len(sequence)] = sequence
                previous_index[sequence[1:]] = sequence[:-1]
                # A shared prefix is in the rows of all its sequences; its result comes from the row of its owner.
                padded_index[own] = num_padded + row * max_length + np.arange(len(prefix), len(sequence))
            buckets.append(Bucket(torch.from_numpy(rows.reshape(-1)).to(device), len(members), max_length))
            num_padded += rows.size
        return cls(
            tuple(buckets), torch.from_numpy(padded_index).to(device), torch.from_numpy(previous_index).to(device)
        )


Sequences = list[tuple[Int64Array, Int64Array]]


def _by_similar_length(sequences: Sequences) -> list[Sequences]:
    groups: list[Sequences] = []
    shortest = 0.0
    for prefix, own in sorted(sequences, key=lambda parts: len(parts[0]) + len(parts[1])):
        length = len(prefix) + len(own)
        if not groups or length > shortest * _BUCKET_GROWTH:
            groups.append([])
            shortest = length
        groups[-1].append((prefix, own))
    return groups


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, with the signature of AttentionInterface.

    Shapes: query [1, H, T, E], key and value [1, K, T, E] -> [1, T, H, E].
    """
    rows = []
    for bucket in packed.buckets:
        # Padding is at the end of a row, so the causal mask hides it from all used results.
        q, k, v = (_padded_rows(part, bucket) for part in (query, key, value))
        if softcap or (sliding_window and sliding_window < bucket.max_length):
            positions = torch.arange(bucket.max_length, device=q.device)
            visible = visible_columns(positions[None], bucket.max_length, sliding_window or 0)
            out = masked_attention(
                q, k, v, visible, q.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0
            )
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        rows.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(rows).index_select(0, packed.padded_index)[None], None


def _padded_rows(part: Tensor, bucket: Bucket) -> Tensor:
    """[1, heads, T, E] -> [S, heads, L, E]."""
    rows = part[0].transpose(0, 1).index_select(0, bucket.packed_index)
    return rows.view(bucket.num_sequences, bucket.max_length, *rows.shape[1:]).transpose(1, 2)


def visible_columns(positions: Tensor, width: int, window: int) -> Tensor:
    """Mask of the `width` columns that a query at each position sees: up to itself, at most the last `window` if not 0.

    Shapes: positions [B, L] -> bool [B, 1, L, width].
    """
    columns, positions = torch.arange(width, device=positions.device), positions[:, None, :, None]
    visible = columns <= positions
    return visible & (columns > positions - window) if window else visible


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention restricted to `visible`; scores are capped to softcap * tanh(score / softcap) if softcap > 0.

    Shapes: query [B, H, L, E], key and value [B, K, W, E], visible broadcasts to [B, H, L, W] -> [B, H, L, E].
    """
    num_groups = query.shape[1] // key.shape[1]
    if not softcap:
        return F.scaled_dot_product_attention(query, key, value, visible, scale=scale, enable_gqa=num_groups > 1)
    scores = query.float() @ key.repeat_interleave(num_groups, 1).float().transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (probabilities @ value.repeat_interleave(num_groups, 1).float()).to(query.dtype)


def register_packed_attention() -> str:
    """Register `packed_attention` with transformers; return its name, for loading models.

    transformers imports its model code here, which takes seconds. Processes without such a model never call this.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION
