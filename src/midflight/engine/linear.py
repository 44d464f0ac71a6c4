"""Weight matrices in the layout in which a product with few rows is fast.

Suffixes: T tokens, in and out features.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.weight_sets import Writer

# MKL's packed format pays from about this many elements on; smaller matrices stay in cache as they are. Packing goes in
# one piece, so an output head would hold up an update for longer than its slice.
_PACK_FROM, _PACK_UP_TO = 1 << 19, 1 << 23
# The number of rows MKL is told to expect. It is a hint: any number gives the same result.
_EXPECTED_ROWS = 64


class Linear(Protocol):
    def writer(self, start: int, stop: int) -> Writer:
        """What takes a Hugging Face weight [stop - start, in] as the output features `start` to `stop`."""
        ...

    def finish(self) -> None:
        """All features have been written."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out]."""
        ...


def make_linear(
    num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, kernels: ReferenceKernels
) -> Linear:
    can_pack = device.type == "cpu" and dtype is torch.float32 and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if can_pack and _PACK_FROM <= num_in * num_out <= _PACK_UP_TO:
        return PackedLinear(num_in, num_out)
    return TransposedLinear(num_in, num_out, dtype, device, kernels)


class TransposedLinear:
    """[in, out] in memory: with 8 to 48 rows up to four times as fast on a CPU as [out, in]."""

    def __init__(
        self, num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, kernels: ReferenceKernels
    ) -> None:
        self._weight, self._kernels = torch.empty(num_in, num_out, dtype=dtype, device=device), kernels

    def writer(self, start: int, stop: int) -> Writer:
        target = self._weight[:, start:stop]
        return lambda weight: self._kernels.linear_layout(weight, target)

    def finish(self) -> None:
        pass

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ self._weight if bias is None else torch.addmm(bias, x, self._weight)


class PackedLinear:
    """Beside the plain [out, in], a copy in the format of MKL's own; float32 on a CPU."""

    def __init__(self, num_in: int, num_out: int) -> None:
        self._weight = torch.empty(num_out, num_in)
        self._packed: Tensor | None = None

    def writer(self, start: int, stop: int) -> Writer:
        return self._weight[start:stop].copy_

    def finish(self) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self._weight, _EXPECTED_ROWS)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) == 1:  # the packed format is no help to a product of matrix and vector
            return F.linear(x, self._weight, bias)
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._weight, bias, len(x))
        return out
