"""Weight matrices in layouts that make products with few tokens fast.

Suffixes: T tokens, in and out features.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.weight_sets import Writer

# Sizes (elements) for which MKL's packed format pays: smaller matrices stay in the CPU's cache anyway. A larger one,
# such as an output head, would take longer to pack than a slice of an update may last.
_PACK_FROM, _PACK_UP_TO = 1 << 19, 1 << 23
# Hint to MKL: expected number of tokens. It does not change results.
_EXPECTED_ROWS = 64


class Linear(Protocol):
    """A weight matrix that can be written in blocks of output features."""

    def writer(self, start: int, stop: int) -> Writer:
        """Return a writer that stores a Hugging Face weight [stop - start, in] as output features `start` to `stop`."""
        ...

    def begin(self) -> None:
        """Prepare to write all features anew."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the matrix, [T, in] -> [T, out]."""
        ...


def make_linear(
    num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, kernels: ReferenceKernels
) -> Linear:
    """Allocate a matrix in the fastest layout for its size, dtype and device."""
    if is_packed(num_in, num_out, dtype, device):
        return PackedLinear(num_in, num_out)
    return TransposedLinear(num_in, num_out, dtype, device, kernels)


def is_packed(num_in: int, num_out: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a matrix is stored twice: as it is, and in MKL's packed format."""
    can_pack: bool = device.type == "cpu" and dtype is torch.float32 and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return can_pack and _PACK_FROM <= num_in * num_out <= _PACK_UP_TO


class TransposedLinear:
    """Weights stored as [in, out]: on a CPU up to four times as fast as [out, in] with 8 to 48 tokens."""

    def __init__(
        self, num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, kernels: ReferenceKernels
    ) -> None:
        self._weight, self._kernels = torch.empty(num_in, num_out, dtype=dtype, device=device), kernels

    def writer(self, start: int, stop: int) -> Writer:
        target = self._weight[:, start:stop]
        return lambda weight: self._kernels.linear_layout(weight, target)

    def begin(self) -> None:
        pass

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ self._weight if bias is None else torch.addmm(bias, x, self._weight)


class PackedLinear:
    """Weights stored as [out, in] and as a copy in MKL's packed format; float32 on a CPU."""

    def __init__(self, num_in: int, num_out: int) -> None:
        self._weight = torch.empty(num_out, num_in)
        self._packed: Tensor | None = None
        self._num_missing = num_out  # features to write before the matrix can be packed

    def begin(self) -> None:
        self._num_missing = len(self._weight)

    def writer(self, start: int, stop: int) -> Writer:
        def write(weight: Tensor) -> None:
            self._weight[start:stop].copy_(weight)
            self._num_missing -= stop - start
            if not self._num_missing:
                self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self._weight, _EXPECTED_ROWS)

        return write

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) == 1:  # the packed format does not speed up a matrix-vector product
            return F.linear(x, self._weight, bias)
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._weight, bias, len(x))
        return out
