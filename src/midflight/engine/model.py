"""What the engine needs of a model: logits for a step's tokens, and weights that can be replaced between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from midflight.engine.cache import KVCache
from midflight.engine.kernels.cpu import cpu_kernels
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.plan import Batch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What page sizes and request limits follow from."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # the longest sequence the model knows positions for, tokens


class EngineModel(Protocol):
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    kernels: ReferenceKernels

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Run the batch's tokens, writing their keys and values; float32 logits [len(batch.logits_index), V]."""
        ...

    @property
    def weight_set(self) -> int:
        """Which of the two sets of weight tensors `forward` reads now: 0 or 1."""
        ...

    def begin_update(self, weights: Mapping[str, Tensor]) -> None:
        """Raises: WeightUpdateError if a name, shape or dtype does not fit, or an update is pending."""
        ...

    def continue_update(self, budget_s: float | None) -> bool:
        """Copy for about `budget_s` seconds (None: to the end); True once the new weights serve.

        Raises: NonFiniteWeightsError naming the tensor; the update is then over, and the old weights go on serving.
        """
        ...


def best_kernels(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> ReferenceKernels:
    """The fastest kernels that work here."""
    if device.type == "cuda":
        from midflight.engine.kernels.gpu import GpuKernels

        return GpuKernels()
    return cpu_kernels(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype) or ReferenceKernels()
