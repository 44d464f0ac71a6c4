"""Attention over packed sequences, plugged into any Hugging Face model through transformers' AttentionInterface.

A microbatch is one row of T tokens, several sequences end to end. Everything but attention works on those T tokens;
attention alone is laid out as padded rows, sequences of similar length together, so that no sequence sees another
and the fused causal kernel (forward and backward) is used.

Suffixes: T packed tokens, S sequences of one bucket, L its longest, H heads, K key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

PACKED_ATTENTION = "midflight_packed"
# Bucket boundaries grow by this factor: at most a quarter of a padded row is padding.
_BUCKET_GROWTH = 4 / 3


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length: where their tokens stand in the packed row, and in the padded one."""

    packed_index: Tensor  # int64 [tokens of these sequences]
    padded_index: Tensor  # int64 [the same], into S * L
    num_sequences: int
    max_length: int


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """The layout of one microbatch, computed once and used by every layer."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedSequences:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        buckets: list[Bucket] = []
        members: list[int] = []
        shortest = 0
        for sequence in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            if members and lengths[sequence] > shortest * _BUCKET_GROWTH:
                buckets.append(_bucket(members, lengths, starts, device))
                members = []
            if not members:
                shortest = lengths[sequence]
            members.append(sequence)
        if members:
            buckets.append(_bucket(members, lengths, starts, device))
        return cls(tuple(buckets))


def _bucket(members: list[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> Bucket:
    max_length = max(lengths[member] for member in members)
    packed = [torch.arange(starts[member], starts[member] + lengths[member]) for member in members]
    padded = [torch.arange(lengths[member]) + row * max_length for row, member in enumerate(members)]
    return Bucket(torch.cat(packed).to(device), torch.cat(padded).to(device), len(members), max_length)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; the signature is the AttentionInterface's.

    Shapes: query [1, H, T, E], key and value [1, K, T, E] -> [1, T, H, E].
    """
    q_THE, k_TKE, v_TKE = (part[0].transpose(0, 1) for part in (query, key, value))
    pieces, indices = [], []
    for bucket in packed.buckets:
        q, k, v = (_pad(part, bucket) for part in (q_THE, k_TKE, v_TKE))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        pieces.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.padded_index))
        indices.append(bucket.packed_index)
    if len(pieces) == 1:
        order, joined = indices[0], pieces[0]
    else:
        order, joined = torch.cat(indices), torch.cat(pieces)
    out_THE = torch.empty_like(joined).index_copy(0, order, joined)
    return out_THE[None], None


def _pad(part: Tensor, bucket: Bucket) -> Tensor:
    """[T, heads, E] -> [S, heads, L, E], zeros where a sequence is shorter than the bucket's longest."""
    rows = part.new_zeros(bucket.num_sequences * bucket.max_length, *part.shape[1:])
    rows = rows.index_copy(0, bucket.padded_index, part.index_select(0, bucket.packed_index))
    return rows.view(bucket.num_sequences, bucket.max_length, *part.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
