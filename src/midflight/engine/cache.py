"""The paged KV cache: keys and values of every sequence.

Suffixes: K key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens per page. Sixteen scores fill one vector register of the CPU kernel.
PAGE_SIZE = 16
# Never allocated to a sequence: captured CUDA graphs write the keys and values of padding here.
SCRATCH_PAGE = 0


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The cached keys and values of one layer."""

    keys: Tensor  # [pages, K, E, PAGE_SIZE]: the tokens of a page are contiguous
    values: Tensor  # [pages, K, PAGE_SIZE, E]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]


class KVCache:
    """The cache of all layers, allocated as one tensor."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = (num_layers, 2, num_pages, num_kv_heads * head_dim * PAGE_SIZE)
        self._pages = torch.zeros(size, dtype=dtype, device=device)
        self.layers = tuple(
            KVLayer(
                keys.view(num_pages, num_kv_heads, head_dim, PAGE_SIZE),
                values.view(num_pages, num_kv_heads, PAGE_SIZE, head_dim),
            )
            for keys, values in self._pages
        )

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, given as (source, target) pairs; every source is read before any target is written."""
        sources, targets = torch.tensor(copies, device=self._pages.device).unbind(1)
        self._pages.index_copy_(2, targets, self._pages.index_select(2, sources))


def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Size of one page over all layers (bytes)."""
    return num_layers * 2 * num_kv_heads * head_dim * PAGE_SIZE * dtype.itemsize
