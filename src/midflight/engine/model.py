"""The model protocol of the engine: logits for the tokens of a step, and weights that another thread can replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from midflight.engine.cache import KVCache
from midflight.engine.kernels.cpu import cpu_kernels
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.plan import Batch
from midflight.engine.weight_sets import WeightSets


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that determine page sizes and request limits."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # longest sequence that the model has positions for (tokens)


class EngineModel(Protocol):
    """A model that the engine can run and update."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    kernels: ReferenceKernels
    weights: WeightSets[Any]

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Run the tokens of the batch and cache their keys and values.

        Shapes: -> float32 logits [len(batch.logits_index), V].
        """
        ...


def best_kernels(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> ReferenceKernels:
    """Return the fastest kernels that work on this machine."""
    if device.type == "cuda":
        from midflight.engine.kernels.gpu import GpuKernels

        return GpuKernels()
    return cpu_kernels(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype) or ReferenceKernels()
