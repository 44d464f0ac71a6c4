"""Paged attention of decode steps in Triton, for CUDA. Prefills and most other kernels come from the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midflight.engine.cache import PAGE_SIZE, KVLayer
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.plan import Batch

# tl.dot needs at least this many rows and columns; the query heads of a group and the head dimension are padded to it.
_MIN_DOT_SIZE = 16
# Explicit, because newer versions of Triton warn about relying on the default.
COMPILER_OPTIONS = {"enable_fp_fusion": True}


class GpuKernels(ReferenceKernels):
    """Triton implementation of ReferenceKernels, which has the contracts. A decode step never synchronizes the host."""

    def linear_layout(self, weight: Tensor, out: Tensor) -> None:
        # Transposed on the device: a copy between devices would first transpose on the CPU, slower than the transfer.
        out.copy_(weight.to(out.device).t())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def attend(
        self, query: Tensor, batch: Batch, layer: KVLayer, scale: float, softcap: float = 0.0, window: int = 0
    ) -> Tensor:
        num_decode = batch.num_decode
        if not num_decode:
            return super().attend(query, batch, layer, scale, softcap, window)
        decoded = paged_decode_attention(
            query[:num_decode], layer, batch.tables, batch.slots, batch.positions, scale, softcap, window
        )
        if not batch.chunks:
            return decoded
        return torch.cat([decoded, self.attend_chunks(query, batch, layer, scale, softcap, window)])


def paged_decode_attention(
    query: Tensor,
    layer: KVLayer,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Attention of one query token per sequence to the pages of the sequence, up to the token's position.

    Shapes: query [B, H * E]; tables int32 [slots, pages]; slots and positions int64, the first B entries are used
        -> [B, H * E].
    """
    num_tokens, width = query.shape
    head_dim, num_kv_heads = layer.head_dim, layer.num_kv_heads
    out = torch.empty((num_tokens, width), dtype=query.dtype, device=query.device)
    # Triton launches on the current device of the thread, which need not be the tensors' device.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _decode_kernel[(num_tokens, num_kv_heads)](
            query,
            layer.keys,
            layer.values,
            tables,
            slots,
            positions,
            out,
            query.stride(0),
            tables.stride(0),
            scale,
            softcap,
            window,
            **kernel_constants(width // head_dim, num_kv_heads, head_dim, softcap),
            **COMPILER_OPTIONS,
        )
    return out


def kernel_constants(num_heads: int, num_kv_heads: int, head_dim: int, softcap: float) -> dict[str, int | bool]:
    """Arguments that the kernel is compiled for."""
    group_size = num_heads // num_kv_heads
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP_SIZE": group_size,
        "GROUP_ROWS": max(_MIN_DOT_SIZE, triton.next_power_of_2(group_size)),
        "HEAD_DIM": head_dim,
        "HEAD_COLUMNS": max(_MIN_DOT_SIZE, triton.next_power_of_2(head_dim)),
        "PAGE": PAGE_SIZE,
        "SOFTCAP": softcap > 0,
    }


@triton.jit
def _decode_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Attention of one query token in one key/value head: online softmax over the pages of the sequence."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + token)
    table = tables + tl.load(slots + token) * table_stride
    heads, columns, in_page = tl.arange(0, GROUP_ROWS), tl.arange(0, HEAD_COLUMNS), tl.arange(0, PAGE)
    inside = (heads[:, None] < GROUP_SIZE) & (columns[None, :] < HEAD_DIM)
    offsets = (kv_head * GROUP_SIZE + heads[:, None]) * HEAD_DIM + columns[None, :]
    q = tl.load(query + token * query_stride + offsets, mask=inside, other=0.0)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)

    top = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    sums = tl.zeros([GROUP_ROWS, HEAD_COLUMNS], tl.float32)
    for index in range(first // PAGE, position // PAGE + 1):
        page = tl.load(table + index).to(tl.int64) * NUM_KV_HEADS + kv_head
        in_head = columns < HEAD_DIM
        k = tl.load(
            keys + page * HEAD_DIM * PAGE + columns[:, None] * PAGE + in_page[None, :], mask=in_head[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1 - 2 / (tl.exp(scores * 2 / softcap) + 1))
        at = index * PAGE + in_page
        visible = (at <= position) & (at >= first)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay = tl.exp(top - new_top)
        p = tl.exp(scores - new_top[:, None])
        v = tl.load(
            values + page * HEAD_DIM * PAGE + in_page[:, None] * HEAD_DIM + columns[None, :],
            # Other entries of the page may hold NaN, which a probability of 0 does not mask.
            mask=visible[:, None] & in_head[None, :],
            other=0.0,
        )
        sums = sums * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(p, 1)
        top = new_top
    tl.store(out + token * NUM_KV_HEADS * GROUP_SIZE * HEAD_DIM + offsets, sums / total[:, None], mask=inside)
