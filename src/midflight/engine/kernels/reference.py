"""The kernels in plain PyTorch: slow, easy to verify, and the same on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from midflight.engine.cache import PAGE_SIZE, KVLayer
from midflight.engine.plan import Batch
from midflight.engine.sampler import sample
from midflight.models.attention import masked_attention, visible_columns

# Largest number of sequences gathered from the cache at a time; bounds the copy of their keys and values.
_GATHER_SEQS = 64


class ReferenceKernels:
    """The contracts of all kernels and their PyTorch implementation. Stateless: all layers share one instance."""

    def linear_layout(self, weight: Tensor, out: Tensor) -> None:
        """Write the transposed weight to `out`, which may be a block of columns and may have another dtype.

        Shapes: weight [out features, in features] -> out [in features, out features].
        """
        out.copy_(weight.t())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight, normalized in float32.

        Shapes: x [T, D], weight [D] -> [T, D].
        """
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normalized.to(x.dtype) * weight

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [T, 2 I] -> [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_and_store(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        batch: Batch,
        layer: KVLayer,
    ) -> Tensor:
        """Apply the norms and rotary positions, store keys and values in the cache, and return the queries.

        Shapes: qkv [T, (H + 2 K) * E]; rope: cos and sin, float32 [positions, E / 2]; norms: query and key norm, [E]
            -> [T, H * E].
        """
        num_tokens, head_dim, num_kv_heads = len(qkv), layer.head_dim, layer.num_kv_heads
        heads = qkv.view(num_tokens, -1, head_dim)
        rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        num_heads = rotated.shape[1] - num_kv_heads
        if norms:
            query = self.rms_norm(rotated[:, :num_heads], norms[0], eps)
            key = self.rms_norm(rotated[:, num_heads:], norms[1], eps)
            rotated = torch.cat([query, key], dim=1)
        cos, sin = (table[batch.positions][:, None] for table in rope)
        first, second = rotated.float().chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
        self.store(rotated[:, num_heads:], value, batch, layer)
        return rotated[:, :num_heads].reshape(num_tokens, -1)

    def store(self, key: Tensor, value: Tensor, batch: Batch, layer: KVLayer) -> None:
        """Store the keys and values, [T, K, E] each, in the cache at `batch.slot_mapping`."""
        pages, offsets = batch.slot_mapping // PAGE_SIZE, batch.slot_mapping % PAGE_SIZE
        layer.keys[pages, :, :, offsets] = key
        layer.values[pages, :, offsets] = value

    def attend(
        self, query: Tensor, batch: Batch, layer: KVLayer, scale: float, softcap: float = 0.0, window: int = 0
    ) -> Tensor:
        """Causal attention of every token to the cached keys and values of its sequence, [T, H * E] -> [T, H * E].

        `softcap` > 0 caps scores smoothly. `window` > 0 limits attention to the last `window` tokens, the token itself
        included.
        """
        parts = [
            self._attend_decodes(
                slice(start, min(start + _GATHER_SEQS, batch.num_decode)), query, batch, layer, scale, softcap, window
            )
            for start in range(0, batch.num_decode, _GATHER_SEQS)
        ]
        if batch.chunks:
            parts.append(self.attend_chunks(query, batch, layer, scale, softcap, window))
        return torch.cat(parts)

    def attend_chunks(
        self, query: Tensor, batch: Batch, layer: KVLayer, scale: float, softcap: float, window: int
    ) -> Tensor:
        """Attention of the prefill tokens of the batch, one chunk at a time; parameters as for `attend`."""
        parts = []
        for chunk in batch.chunks:
            length = chunk.first_position + chunk.stop - chunk.start
            key, value = _gather(batch.tables[chunk.slot, : -(-length // PAGE_SIZE)][None], layer)
            positions = batch.positions[chunk.start : chunk.stop]
            # The tokens of a chunk are the queries of one sequence: [1, H, t, E].
            heads = query[chunk.start : chunk.stop].view(-1, query.shape[1] // layer.head_dim, layer.head_dim)
            attended = _attention(heads.transpose(0, 1)[None], key, value, positions[None], scale, softcap, window)
            parts.append(attended[0].transpose(0, 1).reshape(chunk.stop - chunk.start, -1))
        return torch.cat(parts)

    def sample(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one token per sequence; see sampler.sample."""
        return sample(logits, temperatures, uniforms)

    def _attend_decodes(
        self, part: slice, query: Tensor, batch: Batch, layer: KVLayer, scale: float, softcap: float, window: int
    ) -> Tensor:
        """Attention of some of the decoding tokens, each the only query of its sequence: [B, H, 1, E]."""
        num_pages = -(-batch.max_length // PAGE_SIZE)
        key, value = _gather(batch.tables[batch.slots[part], :num_pages], layer)
        heads = query[part].view(len(key), -1, 1, layer.head_dim)
        attended = _attention(heads, key, value, batch.positions[part, None], scale, softcap, window)
        return attended.reshape(len(key), -1)


def _gather(tables: Tensor, layer: KVLayer) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of these pages, [B, pages] -> [B, K, W, E] each; W = pages * PAGE_SIZE."""
    size = (len(tables), layer.num_kv_heads, -1, layer.head_dim)
    key = layer.keys[tables].permute(0, 2, 1, 4, 3).reshape(size)
    value = layer.values[tables].transpose(1, 2).reshape(size)
    return key, value


def _attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, softcap: float, window: int
) -> Tensor:
    """Attention over gathered keys and values.

    Shapes: query [B, H, t, E], positions [B, t], key and value [B, K, W, E] -> [B, H, t, E].
    """
    visible = visible_columns(positions, key.shape[2], window)
    # Cache entries outside the sequence may hold NaN, which neither a mask of -inf nor a probability of 0 removes.
    hidden = ~visible.any(dim=2)[..., None]
    key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    return masked_attention(query, key, value, visible, scale, softcap)
