"""Memory of the processes of a run (bytes), computed from the model's config.json. Reads no weights.

These are estimates. They leave out code and libraries, CUDA contexts and graphs, buffers of collectives, fragmentation,
and the KV cache of shared prefixes, which has no pages of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midflight.config.sections import DeepSpeedTrainerConfig, EngineOptions, FsdpTrainerConfig, TrainerConfig
from midflight.engine.cache import PAGE_SIZE, page_bytes
from midflight.engine.hf_module import module_shape
from midflight.engine.loading import natural_dtype
from midflight.models.activation_checkpointing import decoder_layers
from midflight.models.linear_scores import logits_bytes
from midflight.models.loading import load_skeleton
from midflight.models.lora import LoraSettings, adapter_size
from midflight.weights.slot_file import NUM_SLOTS

_FLOAT32 = 4  # bytes
Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of parameters, and the widths of a decoder layer (features). Tied parameters count once."""

    config: Any  # Hugging Face configuration
    num_parameters: int
    num_adapter: int  # parameters of LoRA adapters; 0: all parameters are trained
    num_in_layer: int  # in the largest decoder layer
    num_layers: int
    hidden: int
    query: int  # all heads together
    key: int  # all key/value heads together; values are as wide
    feed_forward: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    head_norms: bool

    @classmethod
    def of(cls, path: Path, lora: LoraSettings | None = None) -> ModelSizes:
        """Read a config.json, or the one in a directory. Raises: ModelError; RecipeError if adapters do not fit."""
        model = load_skeleton(path)
        config, shape = model.config, module_shape(model.config)
        layers = [sum(each.numel() for each in layer.parameters()) for layer in decoder_layers(model)]
        return cls(
            config,
            num_parameters=sum(each.numel() for each in model.parameters()),
            num_adapter=adapter_size(model, lora) if lora else 0,
            num_in_layer=max(layers, default=0),
            num_layers=shape.num_layers,
            hidden=config.hidden_size,
            query=shape.num_heads * shape.head_dim,
            key=shape.num_kv_heads * shape.head_dim,
            # GPT-2 has no such key: 4 times the hidden size.
            feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            vocab_size=shape.vocab_size,
            head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        )

    @property
    def num_trained(self) -> int:
        return self.num_adapter or self.num_parameters

    @property
    def num_frozen(self) -> int:
        return self.num_parameters if self.num_adapter else 0

    @property
    def num_outside_layers(self) -> int:
        return self.num_parameters - self.num_layers * self.num_in_layer


def trainer_memory(sizes: ModelSizes, trainer: TrainerConfig, max_tokens: int, has_proximal: bool) -> Parts:
    """Memory of one rank at its peak, in the backward pass of a microbatch of `max_tokens`.

    With P trained and F frozen parameters, b bytes per element of the forward pass and N ranks:

        masters, gradients, moments    4 P, 4 P, 8 P in float32; with FSDP or ZeRO 1/N of that
        one process                    + b F, and + b P copies for the forward pass unless b = 4
        FSDP                           + b F / N, + b parameters outside the layers, two layers, and their gradients
        ZeRO-2                         + b P;  ZeRO-3: + b P / N and one layer; masters only unless b = 4
        proximal policy                + b P, or a share as of the masters

    Source: Rajbhandari et al. 2020, ZeRO, § 5 (K = 12), with gradients in float32 as in trainer/deepspeed.py; the other
    lines are the tensors of trainer/precision.py and trainer/fsdp.py.
    """
    b = _itemsize(trainer.dtype)
    trained, frozen = sizes.num_trained, sizes.num_frozen
    share, computed = trainer.num_ranks, b * trained if b < _FLOAT32 else 0
    masters, forward, proximal = _FLOAT32 * trained, b * frozen, b * trained
    match trainer:
        case FsdpTrainerConfig():
            # Each is once in the forward pass and once as a gradient.
            gathered = 2 * b * (sizes.num_outside_layers + 2 * sizes.num_in_layer)
            weights, gradients = masters // share + forward // share + gathered, _FLOAT32 * trained // share
            proximal = _FLOAT32 * trained // share
        case DeepSpeedTrainerConfig():
            sharded = trainer.zero_stage == 3
            whole = b * trained // share + 2 * b * sizes.num_in_layer if sharded else b * trained
            weights = whole + (masters // share if b < _FLOAT32 else 0)
            gradients = _FLOAT32 * trained // share
        case _:
            weights, gradients = masters + forward + computed, _FLOAT32 * trained
    return {
        "weights": weights + (proximal if has_proximal else 0),
        "gradients": gradients,
        "optimizer": 2 * _FLOAT32 * trained // share,
        "activations": activation_memory(
            sizes, max_tokens, b, trainer.activation_checkpointing, torch.device(trainer.device)
        ),
    }


def activation_memory(
    sizes: ModelSizes, num_tokens: int, itemsize: int, checkpointing: bool, device: torch.device
) -> int:
    """Peak of all tensors of the forward and backward pass of a microbatch, without weights and their gradients.

    With L layers of A bytes per token, T tokens, D features, F features of the feed-forward layer, V tokens in the
    vocabulary and b bytes per element, the larger of two:

        in the head     the layers' tensors + T D (b + 16) + 4 D V, + 4 D V for a head in bfloat16, + logits
        in a layer      the layers' tensors + 2 T F b + 4 T D
        layers' tensors T L A; with checkpointing T L D b, and in a layer also the T A of this layer

    Source: the tensors that autograd saves, see `layer_bytes`; Korthikanti et al. 2022 count GPT's in the same way.
    """
    layer = num_tokens * layer_bytes(sizes, itemsize)
    kept = sizes.num_layers * (num_tokens * sizes.hidden * itemsize if checkpointing else layer)
    matrices = 1 if itemsize == _FLOAT32 else 2
    head = num_tokens * sizes.hidden * (itemsize + 4 * _FLOAT32) + matrices * _FLOAT32 * sizes.hidden * sizes.vocab_size
    in_layer = 2 * num_tokens * sizes.feed_forward * itemsize + _FLOAT32 * num_tokens * sizes.hidden
    in_head = head + logits_bytes(num_tokens, sizes.vocab_size, device)
    return kept + max(in_head, in_layer + (layer if checkpointing else 0))


def layer_bytes(sizes: ModelSizes, itemsize: int) -> int:
    """Bytes per token that one decoder layer of the Llama family saves for its backward pass.

    Per layer: 2 inputs of norms in float32, 4 normalized or scaled states, 3 of the width of the queries (queries,
    attention, input of the projection), keys and values, 4 in the feed-forward layer, the float32 sums of the softmax
    and of both norms. Norms of the heads save queries and keys twice, once in float32.
    """
    states = 2 * _FLOAT32 * sizes.hidden + 4 * itemsize * sizes.hidden
    attention = itemsize * (3 * sizes.query + 2 * sizes.key) + _FLOAT32 * sizes.num_heads
    norms = 2 * _FLOAT32
    if sizes.head_norms:
        norms += (_FLOAT32 + itemsize) * (sizes.query + sizes.key) + _FLOAT32 * (sizes.num_heads + sizes.num_kv_heads)
    return states + attention + 4 * itemsize * sizes.feed_forward + norms


def engine_memory(sizes: ModelSizes, engine: EngineOptions, published: str, num_seqs: int, max_length: int) -> Parts:
    """Memory of an engine with `num_seqs` sequences in flight.

        weights    the parameters, once or in two sets: one serves while the other one receives an update
        KV cache   pages of 2 * layers * key/value width for every sequence at `max_length`, or engine.kv_cache_mib
        logits     of one decode step: as computed, in float32, and three float32 tensors for sampling

    `published`: dtype of the weights that the engine gets.
    """
    dtype = compute_dtype(engine, published)
    num_pages = num_seqs * -(-max_length // PAGE_SIZE) + 1
    cache = num_pages * page_bytes(sizes.num_layers, sizes.num_kv_heads, sizes.key // sizes.num_kv_heads, dtype)
    limit = cache if engine.kv_cache_mib is None else engine.kv_cache_mib << 20
    return {
        "weights": engine.weight_sets * dtype.itemsize * sizes.num_parameters,
        "KV cache": min(cache, limit),
        "logits": num_seqs * sizes.vocab_size * (dtype.itemsize + 4 * _FLOAT32),
    }


def compute_dtype(engine: EngineOptions, published: str) -> torch.dtype:
    """Return the dtype of an engine that gets weights of dtype `published`."""
    if engine.dtype == "auto":
        return natural_dtype(getattr(torch, published), torch.device(engine.device))
    dtype: torch.dtype = getattr(torch, engine.dtype)
    return dtype


def reference_memory(sizes: ModelSizes) -> Parts:
    """Memory of a frozen reference model, which is always float32."""
    return {"weights": _FLOAT32 * sizes.num_parameters}


def published_memory(sizes: ModelSizes, trainer: TrainerConfig) -> int:
    """Size of one version of the weights on its way to the engines."""
    return _itemsize(trainer.dtype) * sizes.num_parameters


def slots_memory(sizes: ModelSizes, trainer: TrainerConfig) -> int:
    """Size of the weights in shared memory, which hold several versions."""
    return NUM_SLOTS * published_memory(sizes, trainer)


def _itemsize(dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize
