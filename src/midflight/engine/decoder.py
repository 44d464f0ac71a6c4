"""The forward pass of the Llama, Mistral, Qwen2 and Qwen3 families for generation, over fused weights.

One matrix holds the query, key and value projections, another one gate and up: fewer, larger products.

Suffixes: T tokens of a step, D model, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from midflight.engine.cache import KVCache
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.linear import Linear, TransposedLinear, make_linear
from midflight.engine.model import ModelShape, best_kernels
from midflight.engine.plan import Batch
from midflight.engine.weight_sets import WeightSets, Writer, copy_rows, weight_sets

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Kinds of rotary embeddings whose frequencies do not depend on the length of the sequence.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and constants of a decoder, read from a Hugging Face config."""

    model: ModelShape
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    rope_frequencies: tuple[float, ...]  # of the pairs of a head (radians per position)
    rope_scale: float  # factor of cos and sin
    qkv_bias: bool
    out_bias: bool
    head_norms: bool  # queries and keys are normalized per head
    tied_embeddings: bool

    @classmethod
    def from_hf_config(cls, config: Any) -> DecoderShape | None:
        """Read the shape; None if this decoder does not implement the model family or one of its options."""
        if config.model_type not in FAMILIES or config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
            return None
        rope = config.rope_parameters
        if rope.get("rope_type", "default") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1) != 1:
            return None
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            return None
        if config.model_type == "mistral" and config.sliding_window is not None:
            return None
        attention_bias = bool(getattr(config, "attention_bias", False))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        frequencies, scale = _rope_frequencies(config, head_dim)
        return cls(
            model=ModelShape(
                num_layers=config.num_hidden_layers,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                vocab_size=config.vocab_size,
                max_positions=config.max_position_embeddings,
            ),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            rope_frequencies=tuple(frequencies.tolist()),
            rope_scale=scale,
            # Qwen2 always has a bias on q, k, v and never on o. In the other families `attention_bias` covers all four.
            qkv_bias=config.model_type == "qwen2" or attention_bias,
            out_bias=config.model_type != "qwen2" and attention_bias,
            head_norms=config.model_type == "qwen3",
            tied_embeddings=config.tie_word_embeddings,
        )


@dataclass(slots=True)
class LayerWeights:
    """Fused weights of one decoder layer."""

    input_norm: Tensor  # [D]
    qkv: Linear  # D -> (H + 2K) * E
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # query and key, [E]
    out: Linear  # H * E -> D
    out_bias: Tensor | None
    post_norm: Tensor  # [D]
    gate_up: Linear  # D -> 2 * intermediate
    down: Linear  # intermediate -> D


class DecoderWeights:
    """Implements WeightSet: one set of fused weights, with writers for the Hugging Face parameter names."""

    def __init__(
        self, shape: DecoderShape, dtype: torch.dtype, device: torch.device, kernels: ReferenceKernels
    ) -> None:
        self.writers: dict[str, Writer] = {}
        self._matrices: list[Linear] = []
        hidden, vocab_size = shape.hidden_size, shape.model.vocab_size

        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def linear(num_in: int, num_out: int) -> Linear:
            matrix = make_linear(num_in, num_out, dtype, device, kernels)
            self._matrices.append(matrix)
            return matrix

        self.final_norm = empty(hidden)
        self.writers["model.norm.weight"] = copy_rows(self.final_norm)
        self.head: Linear
        self.embed: Callable[[Tensor], Tensor]  # [T] -> [T, D]
        if shape.tied_embeddings:
            self.head = tied = TransposedLinear(hidden, vocab_size, dtype, device, kernels)
            self.embed, self.writers["model.embed_tokens.weight"] = tied.rows, tied.writer(0)
        else:
            embedding, self.head = empty(vocab_size, hidden), linear(hidden, vocab_size)
            self.embed = functools.partial(F.embedding, weight=embedding)
            self.writers |= {
                "model.embed_tokens.weight": copy_rows(embedding),
                "lm_head.weight": self.head.writer(0),
            }
        self.layers = [self._layer(f"model.layers.{i}.", shape, empty, linear) for i in range(shape.model.num_layers)]

    def begin(self) -> None:
        for matrix in self._matrices:
            matrix.begin()

    def _layer(
        self, prefix: str, shape: DecoderShape, empty: Callable[..., Tensor], linear: Callable[[int, int], Linear]
    ) -> LayerWeights:
        hidden, intermediate, head_dim = shape.hidden_size, shape.intermediate_size, shape.model.head_dim
        q_size, kv_size = shape.model.num_heads * head_dim, shape.model.num_kv_heads * head_dim
        layer = LayerWeights(
            input_norm=empty(hidden),
            qkv=linear(hidden, q_size + 2 * kv_size),
            qkv_bias=empty(q_size + 2 * kv_size) if shape.qkv_bias else None,
            head_norms=(empty(head_dim), empty(head_dim)) if shape.head_norms else None,
            out=linear(q_size, hidden),
            out_bias=empty(hidden) if shape.out_bias else None,
            post_norm=empty(hidden),
            gate_up=linear(hidden, 2 * intermediate),
            down=linear(intermediate, hidden),
        )
        qkv_sizes = [q_size, kv_size, kv_size]
        matrices = {
            **_split(layer.qkv, {f"self_attn.{name}_proj": size for name, size in zip("qkv", qkv_sizes, strict=True)}),
            **_split(layer.out, {"self_attn.o_proj": hidden}),
            **_split(layer.gate_up, {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}),
            **_split(layer.down, {"mlp.down_proj": hidden}),
        }
        vectors = {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.post_norm,
        }
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", torch.split(layer.qkv_bias, qkv_sizes), strict=True):
                vectors[f"self_attn.{name}_proj.bias"] = part
        if layer.out_bias is not None:
            vectors["self_attn.o_proj.bias"] = layer.out_bias
        if layer.head_norms:
            vectors["self_attn.q_norm.weight"], vectors["self_attn.k_norm.weight"] = layer.head_norms
        self.writers |= {f"{prefix}{name}": copy_rows(vector) for name, vector in vectors.items()}
        self.writers |= {f"{prefix}{name}.weight": writer for name, writer in matrices.items()}
        return layer


def _split(linear: Linear, sizes: Mapping[str, int]) -> dict[str, Writer]:
    """Return one writer for each projection in a fused matrix; `sizes` gives their output features, in order."""
    stops = list(itertools.accumulate(sizes.values()))
    return {name: linear.writer(stop - size) for (name, size), stop in zip(sizes.items(), stops, strict=True)}


class Decoder:
    """Implements EngineModel with fused weights. Computes in `dtype`; updates must have the dtype of `weights`."""

    def __init__(
        self,
        shape: DecoderShape,
        weights: Mapping[str, Tensor],
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: ReferenceKernels | None = None,
        num_weight_sets: int = 2,
    ) -> None:
        self._decoder_shape, self.shape = shape, shape.model
        self.dtype, self.device = dtype, device
        self.kernels = kernels or best_kernels(shape.model, dtype, device)

        def make() -> DecoderWeights:
            return DecoderWeights(shape, dtype, device, self.kernels)

        self.weights: WeightSets[DecoderWeights] = weight_sets(num_weight_sets, make(), weights, device, make)
        self._rope = _rope_tables(shape, max_length, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        kernels, weights, eps = self.kernels, self.weights.active, self._decoder_shape.norm_eps
        scale = self.shape.head_dim**-0.5
        x = weights.embed(batch.token_ids)
        for layer, kv in zip(weights.layers, cache.layers, strict=True):
            qkv = layer.qkv(kernels.rms_norm(x, layer.input_norm, eps), layer.qkv_bias)
            query = kernels.rope_and_store(qkv, self._rope, layer.head_norms, eps, batch, kv)
            x += layer.out(kernels.attend(query, batch, kv, scale), layer.out_bias)
            gate_up = layer.gate_up(kernels.rms_norm(x, layer.post_norm, eps))
            x += layer.down(kernels.silu_mul(gate_up))
        if batch.chunks:  # a step without chunks needs the logits of every token, in order
            x = x[batch.logits_index]
        return weights.head(kernels.rms_norm(x, weights.final_norm, eps)).float()


def _rope_frequencies(config: Any, head_dim: int) -> tuple[Tensor, float]:
    """Return the rotary frequencies, float32 [E / 2], and the factor of cos and sin."""
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(head_dim // 2, dtype=torch.float32) / (head_dim // 2)
        return config.rope_parameters["rope_theta"] ** -exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return frequencies, float(scale)


def _rope_tables(shape: DecoderShape, max_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles of every position, float32 [max_length, E / 2] each."""
    frequencies = torch.tensor(shape.rope_frequencies, dtype=torch.float32)
    angles = torch.arange(max_length, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * shape.rope_scale).to(device), (angles.sin() * shape.rope_scale).to(device)
