"""Kernels on the device against the reference on the CPU in float32, over shapes that no model of the tests has.

Entries of the cache that no token attends to hold NaN: a kernel that reads one of them shows it.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from benchmarks.gpu.setting import NotApplicableError, Row, Setting
from midflight.engine.cache import PAGE_SIZE, KVCache
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.plan import Batch, Chunk

# Query heads, key/value heads, head dimension.
_GEOMETRIES = (
    (4, 4, 8),
    (4, 2, 32),
    (9, 3, 64),
    (2, 2, 48),
    (8, 1, 80),
    (32, 8, 64),
    (32, 8, 128),
    (40, 2, 96),
    (8, 4, 256),
)
_OPTIONS = ((0.0, 0), (3.0, 0), (0.0, 1), (0.0, 7), (2.0, 300))  # soft cap, window
_POSITIONS = (0, 15, 16, 17, 300, 1000)
_NUM_PAGES = 400
_CHUNK = 13
_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def triton_attention_float32(setting: Setting) -> list[Row]:
    """Compare the attention of decode steps in float32."""
    return _attention(setting, torch.float32)


def triton_attention_bfloat16(setting: Setting) -> list[Row]:
    """Compare the attention of decode steps in bfloat16."""
    if not setting.is_cuda:
        raise NotApplicableError("Triton's interpreter has no bfloat16")
    return _attention(setting, torch.bfloat16)


def _attention(setting: Setting, dtype: torch.dtype) -> list[Row]:
    kernels = gpu_kernels()
    rows = []
    for num_heads, num_kv_heads, head_dim in _GEOMETRIES[: 3 if setting.small else None]:
        for softcap, window in _OPTIONS:
            batch, keys, values = _case(num_kv_heads, head_dim, dtype, window)
            query = _random(len(_POSITIONS) + _CHUNK, num_heads * head_dim, seed=1).to(dtype)
            scale = head_dim**-0.5
            expected = ReferenceKernels().attend(
                query.float(), batch, _cache(keys.float(), values.float(), "cpu").layers[0], scale, softcap, window
            )
            actual = kernels.attend(
                query.to(setting.on),
                _to(batch, setting.on),
                _cache(keys, values, setting.device).layers[0],
                scale,
                softcap,
                window,
            )
            difference = float((actual.float().cpu() - expected).abs().max())
            case = f"{num_heads}/{num_kv_heads} heads of {head_dim}, soft cap {softcap}, window {window}"
            assert difference <= _TOLERANCE[dtype], f"{case}: differs by {difference:.2e}"
            rows.append({"case": case, "dtype": str(dtype), "largest_difference": difference})
    return rows


def other_kernels(setting: Setting) -> list[Row]:
    """Compare norms, activations, rotary positions, the layout of weights, and sampling."""
    kernels, reference, on = gpu_kernels(), ReferenceKernels(), setting.on
    x, weight, gate_up = _random(7, 96, seed=2), _random(96, seed=3), 9 * _random(7, 96, seed=4)
    out = torch.zeros(33, 100, device=on)
    kernels.linear_layout(_random(70, 33, seed=5), out[:, 20:90])
    angles = 6 * _random(1001, 16, seed=6)
    rope = (angles.cos(), angles.sin())
    batch, keys, values = _case(2, 32, torch.float32, 0)
    qkv = _random(len(batch.positions), (4 + 2 * 2) * 32, seed=7)
    on_device = _cache(keys, values, setting.device)
    on_cpu = _cache(keys, values, "cpu")
    rope_on_device = (rope[0].to(on), rope[1].to(on))
    query = kernels.rope_and_store(qkv.to(on), rope_on_device, None, 1e-5, _to(batch, on), on_device.layers[0])
    expected_query = reference.rope_and_store(qkv, rope, None, 1e-5, batch, on_cpu.layers[0])
    logits = 3 * _random(300, 5000, seed=8)
    temperatures, uniforms = torch.rand(300) + 0.2, torch.rand(300)
    temperatures[::5] = 0
    token_ids, logprobs = kernels.sample(logits.to(on), temperatures.to(on), uniforms.to(on))
    expected_ids, expected_logprobs = reference.sample(logits, temperatures, uniforms)
    assert (token_ids.cpu() == expected_ids).float().mean() > 0.98, "sampled tokens differ"
    same = token_ids.cpu() == expected_ids
    pairs = {
        "rms_norm": (kernels.rms_norm(x.to(on), weight.to(on), 1e-6), reference.rms_norm(x, weight, 1e-6)),
        "silu_mul": (kernels.silu_mul(gate_up.to(on)), reference.silu_mul(gate_up)),
        "linear_layout": (out[:, 20:90], _random(70, 33, seed=5).t()),
        "queries": (query, expected_query),
        "stored_keys": (on_device.layers[0].keys.nan_to_num(), on_cpu.layers[0].keys.nan_to_num()),
        "stored_values": (on_device.layers[0].values.nan_to_num(), on_cpu.layers[0].values.nan_to_num()),
        "sampled_logprobs": (logprobs.cpu()[same], expected_logprobs[same]),
    }
    rows = []
    for name, (actual, expected) in pairs.items():
        difference = float((actual.cpu() - expected).abs().max())
        assert difference <= 2e-5, f"{name} differs by {difference:.2e}"
        rows.append({"case": name, "largest_difference": difference})
    return rows


def gpu_kernels() -> ReferenceKernels:
    """Return the Triton kernels. Raises: NotApplicableError without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise NotApplicableError("Triton is not installed")
    from midflight.engine.kernels.gpu import GpuKernels

    return GpuKernels()


def _random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _case(num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int) -> tuple[Batch, Tensor, Tensor]:
    """Build decoding sequences of very different lengths and one prefill chunk; return the keys and values, too."""
    count, num_pages = len(_POSITIONS), 66
    order = torch.randperm(_NUM_PAGES, generator=torch.Generator().manual_seed(0))
    tables = order[: count * num_pages].view(count, num_pages).int()
    positions = torch.cat([torch.tensor(_POSITIONS), torch.arange(20, 20 + _CHUNK)])
    slots = torch.cat([torch.tensor([3, 1, 0, 5, 4, 2]), torch.full((_CHUNK,), 3)])
    seen = torch.zeros(_NUM_PAGES * PAGE_SIZE, dtype=torch.bool)
    for slot, last in zip(slots.tolist(), positions.tolist(), strict=True):
        visible = torch.arange(max(0, last - window + 1) if window else 0, last + 1)
        seen[tables[slot][visible // PAGE_SIZE].long() * PAGE_SIZE + visible % PAGE_SIZE] = True
    seen = seen.view(_NUM_PAGES, 1, 1, PAGE_SIZE)
    keys = _random(_NUM_PAGES, num_kv_heads, head_dim, PAGE_SIZE, seed=10).to(dtype)
    values = _random(_NUM_PAGES, num_kv_heads, PAGE_SIZE, head_dim, seed=11).to(dtype)
    nan = torch.tensor(torch.nan, dtype=dtype)
    slot_mapping = tables[slots, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    no_tokens = torch.zeros(0, dtype=torch.int64)
    chunks = (Chunk(3, count, count + _CHUNK, 20),)
    batch = Batch(no_tokens, positions, slots, slot_mapping, tables, no_tokens, count, chunks, max(_POSITIONS) + 1)
    return batch, torch.where(seen, keys, nan), torch.where(seen.transpose(2, 3), values, nan)


def _cache(keys: Tensor, values: Tensor, device: str) -> KVCache:
    cache = KVCache(1, keys.shape[1], keys.shape[2], _NUM_PAGES, keys.dtype, torch.device(device))
    cache.layers[0].keys.copy_(keys)
    cache.layers[0].values.copy_(values)
    return cache


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(
        batch.token_ids.to(device),
        batch.positions.to(device),
        batch.slots.to(device),
        batch.slot_mapping.to(device),
        batch.tables.to(device),
        batch.logits_index.to(device),
        batch.num_decode,
        batch.chunks,
        batch.max_length,
    )
