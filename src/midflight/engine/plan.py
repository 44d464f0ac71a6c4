"""The tokens of one step: a StepPlan in NumPy from the scheduler, then a Batch of tensors for the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from midflight.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of the prefill of one slot: tokens `start` .. `stop - 1` of the step, starting at `first_position`."""

    slot: int
    start: int
    stop: int
    first_position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The T tokens of one step: one token for each of `num_decode` decoding slots, then the tokens of the chunks.

    R slots sample a token: first the slots whose last known token is in this step, then the slots whose next logits
    were in the prefix cache. P prompt tokens are scored: in slots that score their prompt, each prompt token that
    follows one of the T tokens.
    """

    token_ids: Int64Array  # [T]
    positions: Int64Array  # [T], position in the sequence
    slots: Int64Array  # [T], slot of the sequence: its row in the page tables
    slot_mapping: Int64Array  # [T], cache location of the token's key and value: page * PAGE_SIZE + offset
    num_decode: int
    chunks: tuple[Chunk, ...]
    max_length: int  # tokens of the longest decoding sequence
    sampled_slots: Int64Array  # [R]
    logits_index: Int64Array  # [R - len(cached_logits) + P], tokens whose logits are needed: to sample, then to score
    scored_slots: Int64Array  # [P]
    scored_positions: Int64Array  # [P], positions of the scored prompt tokens
    cached_logits: tuple[Tensor, ...]  # one [V] for each of the last sampled slots
    copies: tuple[tuple[int, int], ...]  # (source page, target page), made before the forward pass


@dataclass(frozen=True, slots=True)
class Batch:
    """A StepPlan as tensors on the model's device."""

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
    def from_plan(cls, plan: StepPlan, tables: Int32Array, device: torch.device) -> Batch:
        """Move a plan to the device: without a copy on the CPU, asynchronously on other devices.

        Shapes: tables [active slots, pages].
        """

        def to_device(array: npt.NDArray[Any]) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

        return cls(
            token_ids=to_device(plan.token_ids),
            positions=to_device(plan.positions),
            slots=to_device(plan.slots),
            slot_mapping=to_device(plan.slot_mapping),
            tables=to_device(tables),
            logits_index=to_device(plan.logits_index),
            num_decode=plan.num_decode,
            chunks=plan.chunks,
            max_length=plan.max_length,
        )
