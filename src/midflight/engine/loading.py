"""Loading of an EngineModel from a Hugging Face configuration and weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from midflight.engine.cache import KVCache, KVLayer
from midflight.engine.decoder import Decoder, DecoderShape
from midflight.engine.hf_module import HfModule, PagedContext, module_of, module_shape, run_module
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.model import EngineModel
from midflight.engine.plan import Batch
from midflight.errors import ModelError


def engine_model(
    config: Any,
    weights: Mapping[str, Tensor],
    *,
    max_length: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kernels: ReferenceKernels | None = None,
    fused: bool = True,
    num_weight_sets: int = 2,
) -> EngineModel:
    """Build the fused decoder if it supports the model family, else the model's own module.

    `dtype`: dtype of the computation; None: the dtype of the weights, but float32 for bfloat16 weights on a CPU without
    bfloat16 instructions. `fused = False`: always use the model's own module. `num_weight_sets`: 2 to replace weights
    while the engine samples, 1 to save memory.
    """
    device = torch.device(device)
    dtype = dtype or natural_dtype(next(iter(weights.values())).dtype, device)
    shape = DecoderShape.from_hf_config(config) if fused else None
    if shape is None:
        return HfModule(config, weights, dtype=dtype, device=device, kernels=kernels, num_weight_sets=num_weight_sets)
    return Decoder(
        shape,
        weights,
        max_length=max_length,
        dtype=dtype,
        device=device,
        kernels=kernels,
        num_weight_sets=num_weight_sets,
    )


def check_engine_runs(config: Any) -> None:
    """Run two tokens through the model without its weights and check the calls to its attention.

    Raises: ModelError if the engine cannot run this kind of model.
    """
    if DecoderShape.from_hf_config(config) is not None:
        return
    shape, name, probe = module_shape(config), config.model_type, _Probe()
    try:
        with torch.device("meta"):
            two = torch.arange(2)
            batch = Batch(two, two, two, two, two, two, num_decode=2, chunks=(), max_length=1)
            # On the meta device, mixtures of experts support bfloat16 only.
            cache = KVCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, 1, torch.bfloat16, two.device)
            run_module(module_of(_without_padding(config), torch.bfloat16), PagedContext(batch, cache, probe))
    except ModelError as error:
        latent = " (multi-head latent attention)" if hasattr(config, "kv_lora_rank") else ""
        raise ModelError(f"the engine cannot run {name}{latent}: {error}") from error
    except RuntimeError:
        return  # the model branches on values, which meta tensors lack: later layers cannot be checked
    except Exception as error:
        raise ModelError(f"the engine cannot run {name}: its attention cannot be replaced ({error!r})") from error
    if probe.layers != [id(layer) for layer in cache.layers]:
        raise ModelError(
            f"the engine cannot run {name}: its {shape.num_layers} layers do not each call a replaceable attention once"
        )
    if _has_window(config, shape.max_positions) and not probe.has_window:
        window = config.sliding_window
        raise ModelError(f"the engine cannot run {name}: its sliding_window = {window} does not reach its attention")


def _without_padding(config: Any) -> Any:
    """Copy the config without its padding token, which transformers would search for in meta tensors without values."""
    config = copy.deepcopy(config)
    vars(config)["pad_token_id"] = None  # some classes refuse to set it
    return config


def _has_window(config: Any, max_positions: int) -> bool:
    """Return True if a layer attends to less than the whole context."""
    # A value in the file is ignored by transformers if the config class does not define it.
    window = getattr(config, "sliding_window", None) if hasattr(type(config), "sliding_window") else None
    layer_types = getattr(config, "layer_types", None) or ("sliding_attention",)
    in_use = getattr(config, "use_sliding_window", True) and "sliding_attention" in layer_types
    return bool(in_use and window and window < max_positions)


class _Probe(ReferenceKernels):
    """Kernels that record their calls and compute nothing."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.has_window = False

    def store(self, key: Tensor, value: Tensor, batch: Batch, layer: KVLayer) -> None:
        self.layers.append(id(layer))

    def attend(
        self, query: Tensor, batch: Batch, layer: KVLayer, scale: float, softcap: float = 0.0, window: int = 0
    ) -> Tensor:
        self.has_window |= window > 0
        return query


def natural_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the default dtype of the computation: most CPUs emulate bfloat16, several times slower than float32."""
    if device.type == "cpu" and weights is torch.bfloat16 and not _cpu_multiplies_bfloat16():
        return torch.float32
    return weights


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
