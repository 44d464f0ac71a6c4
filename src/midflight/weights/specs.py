"""Names, shapes, dtypes and sizes of the tensors that a transport carries."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": torch.int64}


def specs_of(weights: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specs of these tensors, in their order."""
    return tuple(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in weights.items())


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in a TensorSpec, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a spec. Raises: WeightUpdateError if the dtype cannot be sent."""
    if spec.dtype not in _DTYPES:
        raise WeightUpdateError(f"tensor {spec.name!r} is {spec.dtype}; only {', '.join(_DTYPES)} can be sent")
    return _DTYPES[spec.dtype]


def num_bytes(spec: TensorSpec) -> int:
    """Size of a tensor (bytes). Raises: WeightUpdateError if the dtype cannot be sent."""
    return math.prod(spec.shape) * torch_dtype(spec).itemsize
