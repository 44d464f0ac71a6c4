"""The forward pass of the Llama / Qwen2 family for generation, over fused weights.

Suffixes: B rows, P prompt positions, W cache window, D model, H query heads, K key/value heads, E head dimension,
V vocabulary.

The query, key and value projections are one matrix, gate and up another: fewer, larger products. Two sets of weights
are kept. An update fills the idle set through views that carry the Hugging Face names, then the sets change places,
so no token is ever sampled from a mixture and a failed update changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from midflight.errors import ModelError, WeightUpdateError

FAMILIES = ("llama", "qwen2")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes and constants of a decoder, read from a Hugging Face config."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    attention_bias: bool
    tied_embeddings: bool

    @classmethod
    def from_hf_config(cls, config: Any) -> DecoderShape:
        """Raises: ModelError for a family or an option this decoder does not implement."""
        if config.model_type not in FAMILIES:
            raise ModelError(f"the engine runs {' and '.join(FAMILIES)} models, not {config.model_type}")
        rope = config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise ModelError(f"the engine does not implement rope_type = {rope['rope_type']!r}, only 'default'")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ModelError("the engine does not implement sliding-window attention")
        if getattr(config, "mlp_bias", False) or config.hidden_act != "silu":
            raise ModelError("the engine implements feed-forward layers with silu and no bias only")
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            rope_theta=rope["rope_theta"],
            # Qwen2 always has a bias on q, k, v and never on o; Llama's option puts one on all four.
            attention_bias=config.model_type == "qwen2" or bool(config.attention_bias),
            tied_embeddings=config.tie_word_embeddings,
        )


@dataclass(slots=True)
class LayerWeights:
    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2K) * E, D]
    qkv_bias: Tensor | None
    out: Tensor  # [D, H * E]
    out_bias: Tensor | None
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2 * intermediate, D]
    down: Tensor  # [D, intermediate]


class DecoderWeights:
    """One set of weights, and a view into it for every Hugging Face parameter name."""

    def __init__(self, shape: DecoderShape, out_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        hidden, intermediate = shape.hidden_size, shape.intermediate_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.embedding = empty(shape.vocab_size, hidden)
        self.final_norm = empty(hidden)
        self.head = self.embedding if shape.tied_embeddings else empty(shape.vocab_size, hidden)
        self.layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(q_size + 2 * kv_size, hidden),
                qkv_bias=empty(q_size + 2 * kv_size) if shape.attention_bias else None,
                out=empty(hidden, q_size),
                out_bias=empty(hidden) if out_bias else None,
                post_norm=empty(hidden),
                gate_up=empty(2 * intermediate, hidden),
                down=empty(hidden, intermediate),
            )
            for _ in range(shape.num_layers)
        ]
        self.named: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        if not shape.tied_embeddings:
            self.named["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            self._name_layer(f"model.layers.{index}.", layer, [q_size, kv_size, kv_size])

    def _name_layer(self, prefix: str, layer: LayerWeights, qkv_sizes: list[int]) -> None:
        named = self.named
        named[f"{prefix}input_layernorm.weight"] = layer.input_norm
        named[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm
        for name, part in zip("qkv", torch.split(layer.qkv, qkv_sizes), strict=True):
            named[f"{prefix}self_attn.{name}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", torch.split(layer.qkv_bias, qkv_sizes), strict=True):
                named[f"{prefix}self_attn.{name}_proj.bias"] = part
        named[f"{prefix}self_attn.o_proj.weight"] = layer.out
        if layer.out_bias is not None:
            named[f"{prefix}self_attn.o_proj.bias"] = layer.out_bias
        for name, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            named[f"{prefix}mlp.{name}_proj.weight"] = part
        named[f"{prefix}mlp.down_proj.weight"] = layer.down


class KVCache:
    """Keys and values of every row: per layer [rows, K, length, E]."""

    def __init__(
        self, shape: DecoderShape, num_rows: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (num_rows, shape.num_kv_heads, length, shape.head_dim)
        # Zeros, not garbage: masked positions are multiplied by a zero probability, and 0 * NaN is NaN.
        self.keys = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

    def move_row(self, source: int, target: int, length: int) -> None:
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]

    def write_prefix(self, row: int, prefix: PrefixKV) -> None:
        for cache, part in zip((*self.keys, *self.values), prefix.tensors, strict=True):
            cache[row, :, : part.shape[1]] = part


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys then values of one sequence's first tokens, per layer [K, P, E], and the logits after the last one [V]."""

    tensors: tuple[Tensor, ...]
    next_logits: Tensor


class Decoder:
    """Logits from token ids. Not thread-safe; one engine owns it."""

    def __init__(
        self, shape: DecoderShape, weights: Mapping[str, Tensor], max_length: int, device: torch.device | str = "cpu"
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.dtype = next(iter(weights.values())).dtype
        out_bias = "model.layers.0.self_attn.o_proj.bias" in weights
        self._active, self._idle = (DecoderWeights(shape, out_bias, self.dtype, self.device) for _ in range(2))
        self._cos, self._sin = self._rope_tables(max_length)
        self.load(weights)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Swap in these weights, given under their Hugging Face names.

        Raises: WeightUpdateError if a name, shape or dtype does not fit; nothing has changed then.
        """
        _check_fit(self._idle.named, weights)
        torch._foreach_copy_(list(self._idle.named.values()), [weights[name] for name in self._idle.named])
        self._active, self._idle = self._idle, self._active

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Tensor]) -> list[PrefixKV]:
        """Run whole prefixes, each int64 [P_i], as one right-padded batch; causality hides the padding."""
        lengths = [len(sequence) for sequence in sequences]
        tokens_BP = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self.device)
        num_rows, width = tokens_BP.shape
        cos, sin = self._cos[:width, None], self._sin[:width, None]
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.view(num_rows, width, -1, self.shape.head_dim).transpose(1, 2) for part in (q, k, v))
            keys.append(k)
            values.append(v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(num_rows * width, -1)

        hidden = self._layers(tokens_BP.view(-1), cos.repeat(num_rows, 1, 1), sin.repeat(num_rows, 1, 1), attend)
        last = torch.tensor([row * width + length - 1 for row, length in enumerate(lengths)], device=self.device)
        logits_BV = self._head(hidden[last])
        return [
            PrefixKV(tuple(part[row, :, :length].clone() for part in (*keys, *values)), logits_BV[row])
            for row, length in enumerate(lengths)
        ]

    @torch.inference_mode()
    def decode(self, tokens_B: Tensor, positions_B: Tensor, cache: KVCache, window: int) -> Tensor:
        """Run one new token for rows 0 .. B - 1 of the cache, writing its keys and values; logits [B, V] float32.

        Shapes: tokens_B int64, positions_B int64 (index of the new token), both [B]. `window` > max(positions_B).
        """
        tokens_B, positions_B = tokens_B.to(self.device), positions_B.to(self.device)
        num_rows = len(tokens_B)
        rows = torch.arange(num_rows, device=self.device)
        visible = (torch.arange(window, device=self.device) <= positions_B[:, None])[:, None, None]
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, -torch.inf)
        kv_shape = (num_rows, self.shape.num_kv_heads, -1, self.shape.head_dim)
        layer_caches = iter(zip(cache.keys, cache.values, strict=True))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            key_cache, value_cache = next(layer_caches)
            key_cache[rows, :, positions_B] = k
            value_cache[rows, :, positions_B] = v.view(k.shape)
            # The query heads that share a key head are laid along the query axis: no key is copied.
            out = F.scaled_dot_product_attention(
                q.reshape(kv_shape), key_cache[:num_rows, :, :window], value_cache[:num_rows, :, :window], bias
            )
            return out.reshape(num_rows, -1)

        hidden = self._layers(tokens_B, self._cos[positions_B, None], self._sin[positions_B, None], attend)
        return self._head(hidden)

    def _layers(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:
        """Hidden states [N, D] after the final norm.

        Shapes: `attend(q [N, H, E], k [N, K, E], v [N, K * E])` gives [N, H * E].
        """
        shape, weights = self.shape, self._active
        num_qk_heads, v_size = shape.num_heads + shape.num_kv_heads, shape.num_kv_heads * shape.head_dim
        norm_shape, eps = (shape.hidden_size,), shape.norm_eps
        x = F.embedding(tokens, weights.embedding)
        for layer in weights.layers:
            qkv = F.linear(F.rms_norm(x, norm_shape, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            qk = qkv[:, :-v_size].view(len(x), num_qk_heads, shape.head_dim)
            qk = torch.addcmul(qk * cos, torch.roll(qk, shape.head_dim // 2, -1), sin)
            attended = attend(qk[:, : shape.num_heads], qk[:, shape.num_heads :], qkv[:, -v_size:])
            x = x + F.linear(attended, layer.out, layer.out_bias)
            gate, up = F.linear(F.rms_norm(x, norm_shape, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x, norm_shape, weights.final_norm, eps)

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._active.head).float()

    def _rope_tables(self, max_length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [max_length, E]; the sign of the rotation's first half is folded into sin.

        So that rotate(x) = x * cos + roll(x, E / 2) * sin.
        """
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(max_length, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat([cos, cos], dim=-1).to(self.device, self.dtype),
            torch.cat([-sin, sin], dim=-1).to(self.device, self.dtype),
        )


def _check_fit(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    if expected.keys() != weights.keys():
        missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
        raise WeightUpdateError(f"weight names do not match: missing {missing or 'none'}, unknown {unknown or 'none'}")
    for name, tensor in expected.items():
        new = weights[name]
        if new.shape != tensor.shape or new.dtype != tensor.dtype:
            raise WeightUpdateError(
                f"{name}: expected {tuple(tensor.shape)} {tensor.dtype}, got {tuple(new.shape)} {new.dtype}"
            )
