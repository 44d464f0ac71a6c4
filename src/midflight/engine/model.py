"""The model protocol of the engine: logits for the tokens of a step, and weights that can be replaced between steps."""

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

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Run the tokens of the batch and cache their keys and values.

        Shapes: -> float32 logits [len(batch.logits_index), V].
        """
        ...

    @property
    def weight_set(self) -> int:
        """Index of the set of weight tensors that `forward` reads now, 0 or 1."""
        ...

    def begin_update(self, weights: Mapping[str, Tensor]) -> None:
        """Start an update; the tensors must not change until it has ended.

        Raises: WeightUpdateError if a name, shape or dtype does not fit, or an update is pending.
        """
        ...

    def continue_update(self, budget_s: float | None) -> bool:
        """Copy weights for about `budget_s` seconds (None: to the end); return True once the new weights are active.

        Raises: NonFiniteWeightsError naming the tensor; the update is then canceled, and the old weights stay active.
        """
        ...


def best_kernels(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> ReferenceKernels:
    """Return the fastest kernels that work on this machine."""
    if device.type == "cuda":
        from midflight.engine.kernels.gpu import GpuKernels

        return GpuKernels()
    return cpu_kernels(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype) or ReferenceKernels()
