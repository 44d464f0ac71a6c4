"""The engine's model for a Hugging Face configuration and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from midflight.engine.decoder import Decoder, DecoderShape
from midflight.engine.hf_module import HfModule, module_shape
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.model import EngineModel


def engine_model(
    config: Any,
    weights: Mapping[str, Tensor],
    *,
    max_length: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kernels: ReferenceKernels | None = None,
    fused: bool = True,
) -> EngineModel:
    """The fused decoder where the model's family has one, else the model's own module.

    `dtype` is what is computed in; None: that of the weights, but float32 for bfloat16 weights on a CPU without
    instructions for it. `fused = False` takes the module in any case.
    """
    device = torch.device(device)
    dtype = dtype or natural_dtype(next(iter(weights.values())).dtype, device)
    shape = DecoderShape.from_hf_config(config) if fused else None
    if shape is None:
        return HfModule(config, weights, dtype=dtype, device=device, kernels=kernels)
    return Decoder(shape, weights, max_length=max_length, dtype=dtype, device=device, kernels=kernels)


def check_engine_runs(config: Any) -> None:
    """Raises: ModelError if the engine cannot run this kind of model. Reads no weights."""
    if DecoderShape.from_hf_config(config) is None:
        module_shape(config)


def natural_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in: bfloat16 is emulated on most CPUs, several times slower than float32."""
    if device.type == "cpu" and weights is torch.bfloat16 and not _cpu_multiplies_bfloat16():
        return torch.float32
    return weights


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.backends.cpu.get_capabilities() if hasattr(torch.backends.cpu, "get_capabilities") else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
