"""Any Hugging Face causal LM as an EngineModel: its own module, with attention over the paged cache.

Slower than the fused decoder, because every operation is its own kernel, but works for most models that transformers
can load.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from midflight.engine.cache import KVCache
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.model import ModelShape, best_kernels
from midflight.engine.plan import Batch
from midflight.engine.weight_sets import WeightSets, Writer, copy_rows, weight_sets
from midflight.errors import ModelError

PAGED_ATTENTION = "midflight_paged"
# Tensors that attention modules pass on although attention does not need them: positions are in keys and queries.
_KNOWN_TENSORS = ("position_ids", "cache_position")


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Inputs of attention besides queries, keys and values; passed through the module as a keyword argument."""

    batch: Batch
    cache: KVCache
    kernels: ReferenceKernels


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedContext,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Store the keys and values of this step and attend to the cache, with the signature of AttentionInterface.

    Shapes: query [1, H, T, E], key and value [1, K, T, E] -> [1, T, H, E].
    Raises: ModelError if the module needs another kind of attention, or its keys and values do not fit the cache.
    """
    batch, kernels = paged.batch, paged.kernels
    layer = paged.cache.layers[module.layer_idx]  # type: ignore[index]
    num_tokens, head_dim = query.shape[2:]
    if key.shape != value.shape or (key.shape[1], key.shape[3]) != (layer.num_kv_heads, layer.head_dim):
        # Kernels do not check these sizes.
        raise ModelError(
            f"layer {module.layer_idx} has keys {list(key.shape)} and values {list(value.shape)}; the engine has room"
            f" for {layer.num_kv_heads} heads of {layer.head_dim}"
        )
    tensors = [name for name, other in others.items() if isinstance(other, Tensor) and name not in _KNOWN_TENSORS]
    if attention_mask is not None or tensors:
        unsupported = tensors[0] if tensors else "a mask"
        raise ModelError(
            f"layer {module.layer_idx} gives its attention {unsupported}, which the engine's attention does not support"
        )
    if not getattr(module, "is_causal", True):
        raise ModelError(f"layer {module.layer_idx} attends to later tokens; the engine's attention is causal")
    kernels.store(key[0].transpose(0, 1), value[0].transpose(0, 1), batch, layer)
    flat = query[0].transpose(0, 1).reshape(num_tokens, -1)
    scale = head_dim**-0.5 if scaling is None else scaling
    attended = kernels.attend(flat, batch, layer, scale, softcap or 0.0, sliding_window or 0)
    return attended.view(1, num_tokens, -1, head_dim), None


class ModuleWeights:
    """Implements WeightSet: one instance of the module, with writers for its parameters."""

    def __init__(self, module: Any, kernels: ReferenceKernels) -> None:
        self.module, self._kernels = module.requires_grad_(False), kernels
        embeddings = {id(layer.weight) for layer in self.module.modules() if isinstance(layer, nn.Embedding)}
        matrices = {}
        if next(self.module.parameters()).device.type == "cpu":
            for layer in self.module.modules():
                if isinstance(layer, nn.Linear) and id(layer.weight) not in embeddings:
                    # Stored as [in, out] behind a transposed view; linear.py says why.
                    layer.weight.data = layer.weight.data.t().contiguous().t()
                    matrices[id(layer.weight)] = layer.weight
        self.writers: dict[str, Writer] = {
            name: self._transposed(parameter.data) if id(parameter) in matrices else copy_rows(parameter.data)
            for name, parameter in self.module.named_parameters()
        }

    def _transposed(self, weight: Tensor) -> Writer:
        return lambda block, start: self._kernels.linear_layout(block, weight[start : start + len(block)].t())

    def begin(self) -> None:
        pass

    def another(self) -> ModuleWeights:
        """Allocate a second set.

        Copies the module: to create one from its config would change torch's default dtype, which all threads share.
        """
        empty = {id(parameter): torch.empty_like(parameter) for parameter in self.module.parameters()}
        memo = {key: nn.Parameter(values, requires_grad=False) for key, values in empty.items()}
        return ModuleWeights(copy.deepcopy(self.module, memo), self._kernels)


class HfModule:
    """Implements EngineModel with a module created from `config`. Computes in `dtype`."""

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: ReferenceKernels | None = None,
        num_weight_sets: int = 2,
    ) -> None:
        self.shape = module_shape(config)
        self.dtype, self.device = dtype, device
        self.kernels = kernels or best_kernels(self.shape, dtype, device)
        first = ModuleWeights(module_of(config, dtype).to(device), self.kernels)
        self.weights: WeightSets[ModuleWeights] = weight_sets(num_weight_sets, first, weights, device, first.another)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return run_module(self.weights.active.module, PagedContext(batch, cache, self.kernels))


def module_of(config: Any, dtype: torch.dtype) -> Any:
    """Create a causal LM with the engine's attention, in evaluation mode; its weights are not initialized."""
    # Imported here because the import takes seconds and the fused decoder does not need it.
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(PAGED_ATTENTION, paged_attention)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PAGED_ATTENTION).eval()


def run_module(module: Any, paged: PagedContext) -> Tensor:
    """Run the batch through a module of `module_of`; return float32 logits [len(batch.logits_index), V]."""
    output = module(
        input_ids=paged.batch.token_ids[None],
        position_ids=paged.batch.positions[None],
        use_cache=False,
        logits_to_keep=paged.batch.logits_index,
        paged=paged,
    )
    return output.logits[0].float()  # type: ignore[no-any-return]


def module_shape(config: Any) -> ModelShape:
    """Read the shape from a Hugging Face config.

    Raises: ModelError if the model is no decoder of text, or its layers do not all have keys and values of one size.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(config, "is_encoder_decoder", False):
        part = ", ".join(sorted(kinds)) or "an encoder"
        raise ModelError(f"the engine runs decoders with attention in every layer, not {config.model_type} with {part}")
    if (text := config.get_text_config()) is not config:
        raise ModelError(
            f"the engine runs models of text alone, not {config.model_type} with images or sound; its text part, saved"
            f" as {text.model_type}, would work"
        )
    try:
        num_heads = config.num_attention_heads
        return ModelShape(
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
        )
    # transformers raises a RuntimeError for an attribute that differs between layers.
    except (AttributeError, RuntimeError) as error:
        raise ModelError(f"the engine cannot run {config.model_type}: {str(error).split('. ')[0]}") from error
