"""The Triton kernel compiled for NVIDIA GPUs, which needs no GPU; test_kernels.py compares its results."""

from __future__ import annotations

import pytest

from midflight.engine.kernels.gpu import COMPILER_OPTIONS, _decode_kernel, kernel_constants

_POINTERS = {"query", "keys", "values", "out"}
_TYPES = {"tables": "*i32", "slots": "*i64", "positions": "*i64", "scale": "fp32", "softcap": "fp32"}


@pytest.mark.parametrize(
    ("capability", "dtype", "num_heads", "num_kv_heads", "head_dim", "softcap"),
    [(90, "bf16", 9, 3, 64, 0.0), (90, "fp32", 4, 4, 8, 0.0), (80, "fp32", 2, 2, 48, 3.0)],
)
def test_kernel_compiles(
    capability: int, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, softcap: float
) -> None:
    """The interpreter accepts programs that the compiler refuses, such as dot products of fewer than 16 columns."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = kernel_constants(num_heads, num_kv_heads, head_dim, softcap)
    signature = {
        name: "constexpr" if name in constants else f"*{dtype}" if name in _POINTERS else _TYPES.get(name, "i32")
        for name in _decode_kernel.arg_names
    }
    source = ASTSource(fn=_decode_kernel, signature=signature, constexprs=constants, attrs={})
    compiled = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=COMPILER_OPTIONS)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    # An engine's kernels may use this much on every GPU (bytes).
    assert compiled.metadata.shared <= 48 << 10
