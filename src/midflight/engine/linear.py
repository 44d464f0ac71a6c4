"""Weight matrices in layouts that make products with few tokens fast. Each layout holds the weights once.

Suffixes: T tokens, in and out features.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.weight_sets import Writer

# Sizes (elements) for which MKL's packed format pays: smaller matrices stay in the CPU's cache anyway. A larger one,
# such as an output head, would need a second copy of itself while it is packed.
_PACK_FROM, _PACK_UP_TO = 1 << 19, 1 << 23
# Hint to MKL: expected number of tokens. It does not change results.
_EXPECTED_ROWS = 64


class Linear(Protocol):
    """A weight matrix that can be written in blocks of output features."""

    def begin(self) -> None:
        """Prepare to write all features anew."""
        ...

    def writer(self, first: int) -> Writer:
        """Return a writer of a Hugging Face weight [features, in] whose row 0 is output feature `first`."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the matrix, [T, in] -> [T, out]."""
        ...


def make_linear(
    num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, kernels: ReferenceKernels
) -> Linear:
    """Allocate a matrix in the fastest layout for its size, dtype and device."""
    can_pack = device.type == "cpu" and dtype is torch.float32 and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if can_pack and _PACK_FROM <= num_in * num_out <= _PACK_UP_TO:
        return PackedLinear(num_in, num_out)
    return TransposedLinear(num_in, num_out, dtype, device, kernels)


class TransposedLinear:
    """Weights stored as [in, out]: on a CPU up to four times as fast as [out, in] with 8 to 48 tokens."""

    def __init__(
        self, num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, kernels: ReferenceKernels
    ) -> None:
        self._weight, self._kernels = torch.empty(num_in, num_out, dtype=dtype, device=device), kernels

    def begin(self) -> None:
        pass

    def writer(self, first: int) -> Writer:
        def write(block: Tensor, start: int) -> None:
            column = first + start
            self._kernels.linear_layout(block, self._weight[:, column : column + len(block)])

        return write

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ self._weight if bias is None else torch.addmm(bias, x, self._weight)

    def rows(self, indices: Tensor) -> Tensor:
        """Look up rows of the Hugging Face weight: the embedding of a model that ties it to its head.

        Shapes: [T] -> [T, in].
        """
        return self._weight.index_select(1, indices).t().contiguous()


class PackedLinear:
    """Weights stored in MKL's packed format; float32 on a CPU."""

    def __init__(self, num_in: int, num_out: int) -> None:
        # MKL reads the shape of the unpacked weight, never its elements.
        self._shape_only = torch.zeros(1).expand(num_out, num_in)
        self._packed: Tensor | None = None
        self._unpacked: Tensor | None = None  # rows until all of them are written
        self._num_missing = num_out

    def begin(self) -> None:
        self._unpacked, self._num_missing = None, len(self._shape_only)

    def writer(self, first: int) -> Writer:
        def write(block: Tensor, start: int) -> None:
            if self._unpacked is None:
                self._unpacked = torch.empty(self._shape_only.shape)
            self._unpacked[first + start : first + start + len(block)].copy_(block)
            self._num_missing -= len(block)
            if not self._num_missing:
                self._packed = None  # frees the old weights, whose memory the new ones use
                self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self._unpacked, _EXPECTED_ROWS)
                self._unpacked = None

        return write

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._shape_only, bias, len(x))
        return out
