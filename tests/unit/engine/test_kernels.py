"""Fast kernels compared with the reference, over shapes that no test model has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from midflight.engine.cache import PAGE_SIZE, KVCache
from midflight.engine.kernels import cpu
from midflight.engine.kernels.cpu import cpu_kernels
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.plan import Batch, Chunk

GEOMETRIES = [(4, 2, 32), (9, 3, 64), (2, 2, 48), (8, 1, 80)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2}


def paged_batch(num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, chunk: int = 0) -> tuple[Batch, KVCache]:
    """Build a batch of five decoding slots of very different lengths, with an optional prefill chunk.

    The cache holds random numbers.
    """
    generator = torch.Generator().manual_seed(0)
    last = torch.tensor([0, 15, 16, 300, 1000])
    num_pages = 70
    cache = KVCache(1, num_kv_heads, head_dim, 400, dtype, torch.device("cpu"))
    for part in (cache.layers[0].keys, cache.layers[0].values):
        part.copy_(torch.randn(part.shape, generator=generator))
    tables = torch.randperm(400, generator=generator)[: 5 * num_pages].view(5, num_pages).int()
    positions, slots = last, torch.tensor([3, 1, 0, 4, 2])
    if chunk:
        positions = torch.cat([last, torch.arange(20, 20 + chunk)])
        slots = torch.cat([slots, torch.full((chunk,), 2)])
    slot_mapping = tables[slots, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    chunks = (Chunk(2, 5, 5 + chunk, 20),) if chunk else ()
    no_tokens = torch.zeros(0, dtype=torch.int64)
    return Batch(no_tokens, positions, slots, slot_mapping, tables, no_tokens, 5, chunks, 1001), cache


def fast_kernels(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> cpu.CpuKernels:
    kernels = cpu_kernels(num_heads, num_kv_heads, head_dim, dtype)
    assert kernels, "the tests need a C compiler"
    return kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (3.0, 0), (0.0, 7), (2.0, 300)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), GEOMETRIES)
def test_attention_equals_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, softcap: float, window: int, dtype: torch.dtype
) -> None:
    batch, cache = paged_batch(num_kv_heads, head_dim, dtype, chunk=13)
    query = torch.randn(18, num_heads * head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    arguments = (query, batch, cache.layers[0], head_dim**-0.5, softcap, window)
    actual = fast_kernels(num_heads, num_kv_heads, head_dim, dtype).attend(*arguments)
    torch.testing.assert_close(actual, ReferenceKernels().attend(*arguments), atol=TOLERANCE[dtype], rtol=1e-2)


def with_nan_elsewhere(batch: Batch, cache: KVCache, window: int) -> KVCache:
    """Copy the cache with NaN in every entry that no token of the batch attends to."""
    seen = torch.zeros(400 * PAGE_SIZE, dtype=torch.bool)
    for slot, last in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
        positions = torch.arange(max(0, last - window + 1) if window else 0, last + 1)
        seen[batch.tables[slot][positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE] = True
    keys, values = cache.layers[0].keys, cache.layers[0].values
    poisoned = KVCache(1, keys.shape[1], keys.shape[2], 400, keys.dtype, keys.device)
    seen = seen.view(400, 1, 1, PAGE_SIZE)
    poisoned.layers[0].keys.copy_(torch.where(seen, keys, torch.nan))
    poisoned.layers[0].values.copy_(torch.where(seen.transpose(2, 3), values, torch.nan))
    return poisoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (3.0, 0), (0.0, 7), (2.0, 300)])
@pytest.mark.parametrize("fast", [False, True], ids=["reference", "c"])
def test_nan_in_unused_cache_entries_is_ignored(fast: bool, softcap: float, window: int, dtype: torch.dtype) -> None:
    kernels = fast_kernels(4, 2, 32, dtype) if fast else ReferenceKernels()
    batch, cache = paged_batch(2, 32, dtype, chunk=13)
    query = torch.randn(18, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, actual = (
        kernels.attend(query, batch, kv_cache.layers[0], 0.2, softcap, window)
        for kv_cache in (cache, with_nan_elsewhere(batch, cache, window))
    )
    assert expected.isfinite().all()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), GEOMETRIES)
def test_rope_and_store_equals_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, with_norms: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    angles = torch.rand(1001, head_dim // 2, generator=generator) * 6
    norms = tuple(torch.rand(2, head_dim, generator=generator).to(dtype)) if with_norms else None
    results = []
    for kernels in (fast_kernels(num_heads, num_kv_heads, head_dim, dtype), ReferenceKernels()):
        batch, cache = paged_batch(num_kv_heads, head_dim, dtype)
        rope = (angles.cos(), angles.sin())
        query = kernels.rope_and_store(qkv.clone(), rope, norms, 1e-5, batch, cache.layers[0])
        results.append((query.clone(), cache.layers[0].keys, cache.layers[0].values))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_kernels_equal_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    fast, reference = fast_kernels(4, 2, 32, dtype), ReferenceKernels()
    x, weight = torch.randn(7, 96, generator=generator).to(dtype), torch.rand(96, generator=generator).to(dtype)
    torch.testing.assert_close(fast.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    gate_up = (20 * torch.randn(7, 96, generator=generator)).to(dtype)
    torch.testing.assert_close(fast.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_linear_layout_transposes_into_a_block(source: torch.dtype, target: torch.dtype) -> None:
    weight = torch.randn(70, 33, generator=torch.Generator().manual_seed(4)).to(source)
    out = torch.zeros(33, 100, dtype=target)
    fast_kernels(4, 2, 32, target).linear_layout(weight, out[:, 20:90])
    expected = torch.zeros(33, 100, dtype=target)
    expected[:, 20:90] = weight.t().to(target)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("vocab_size", [3, 511, 512, 5000])
def test_sampling_equals_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(300, vocab_size, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    logits[:, 1] = 0.0
    temperatures = torch.rand(300, generator=generator) + 0.2
    temperatures[::5] = 0
    uniforms = torch.rand(300, generator=generator)
    uniforms[:10], uniforms[10:20] = 0.0, 1 - 2.0**-24
    token_ids, logprobs = fast_kernels(4, 2, 32, torch.float32).sample(logits, temperatures, uniforms)
    expected_ids, expected_logprobs = ReferenceKernels().sample(logits, temperatures, uniforms)
    # If a uniform falls on the border between two tokens, rounding decides.
    assert (token_ids == expected_ids).float().mean() > 0.98
    same = token_ids == expected_ids
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], atol=1e-5, rtol=1e-5)
    assert (logits.gather(1, token_ids[:, None]) > -torch.inf).all()


def test_without_a_compiler_the_reference_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler in ("/nonexistent/cc", "false"):
        monkeypatch.setenv("CC", compiler)
        cpu._build.cache_clear()
        assert cpu_kernels(4, 2, 32, torch.float32) is None
    cpu._build.cache_clear()


@pytest.mark.slow
def test_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._build.cache_clear()
    assert cpu_kernels(4, 2, 32, torch.float32)
    (library,) = tmp_path.rglob("*.so")
    compiled_ns = library.stat().st_mtime_ns
    cpu._build.cache_clear()
    assert cpu_kernels(4, 2, 32, torch.float32)
    assert [(path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.so")] == [(library, compiled_ns)]
    cpu._build.cache_clear()


@pytest.mark.slow
def test_gpu_kernel_in_the_interpreter_equals_the_reference() -> None:
    """Run the kernel on the CPU in Triton's interpreter; only float32, because the interpreter lacks bfloat16."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("run_gpu_kernel.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_truncation_keeps_the_expected_tokens() -> None:
    from midflight.engine.sampler import truncate

    probabilities = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1])
    cases = [
        ((0, 1.0, 0.0), {0, 1, 2, 3, 4}),
        ((2, 1.0, 0.0), {1, 2}),
        ((0, 0.6, 0.0), {1, 2}),
        ((0, 0.66, 0.0), {1, 2, 3}),
        ((0, 1e-9, 0.0), {1}),
        ((0, 1.0, 0.3), {1, 2, 3}),
        ((3, 0.5, 0.0), {1, 2}),  # two of the three tokens of top-k, renormalized, add up to 0.5
        ((0, 1.0, 1.0), {1}),
    ]
    options = np.array([option for option, _ in cases], dtype=np.float32)
    logits = probabilities.log().expand(len(cases), -1)
    top_ks, top_ps, min_ps = torch.from_numpy(options).unbind(1)
    kept = truncate(logits, torch.ones(len(cases)), top_ks.long(), top_ps, min_ps)
    for row, (_, expected) in zip(kept, cases, strict=True):
        assert set(torch.isfinite(row).nonzero().flatten().tolist()) == expected
    # A higher temperature flattens the distribution first, so that top_p = 0.6 keeps more tokens.
    hot = truncate(logits[:1], torch.tensor([4.0]), torch.tensor([0]), torch.tensor([0.6]), torch.tensor([0.0]))
    assert torch.isfinite(hot).sum() == 3
