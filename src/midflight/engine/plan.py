"""What one step computes: first in NumPy, as the scheduler decides it, then as tensors, as the model reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from midflight.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` .. `stop - 1` of a step: a piece of the prefill of one slot, from `first_position` on."""

    slot: int
    start: int
    stop: int
    first_position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The tokens of one step: one for each of `num_decode` slots, then the chunks; T in all.

    R slots get a new token: those whose last known token is among the T, and after them those whose next logits were
    found in the prefix cache. P prompt tokens are scored: those after one of the T, in slots that ask for it.
    """

    token_ids: Int64Array  # [T]
    positions: Int64Array  # [T], in their sequence
    slots: Int64Array  # [T], whose page table holds their sequence
    slot_mapping: Int64Array  # [T], where their keys and values go
    num_decode: int
    chunks: tuple[Chunk, ...]
    max_length: int  # tokens of the longest decoding sequence
    sampled_slots: Int64Array  # [R]
    logits_index: Int64Array  # [R - num cached + P]: which of the T tokens those slots sample after; then the scored
    scored_slots: Int64Array  # [P]
    scored_positions: Int64Array  # [P], of the tokens that are scored
    cached_logits: tuple[Tensor, ...]  # one [V] for each of the last slots
    copies: tuple[tuple[int, int], ...]  # (source page, target page), before anything else


@dataclass(frozen=True, slots=True)
class Batch:
    """A StepPlan on the model's device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    tables: Tensor  # int32 [slots, pages]
    logits_index: Tensor  # int64
    num_decode: int
    chunks: tuple[Chunk, ...]
    max_length: int

    @classmethod
    def of(cls, plan: StepPlan, tables: Int32Array, device: torch.device) -> Batch:
        """`tables`: [active slots, pages]. Nothing is copied on the CPU; elsewhere nothing waits for the copy."""

        def moved(array: npt.NDArray[Any]) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

        return cls(
            token_ids=moved(plan.token_ids),
            positions=moved(plan.positions),
            slots=moved(plan.slots),
            slot_mapping=moved(plan.slot_mapping),
            tables=moved(tables),
            logits_index=moved(plan.logits_index),
            num_decode=plan.num_decode,
            chunks=plan.chunks,
            max_length=plan.max_length,
        )
