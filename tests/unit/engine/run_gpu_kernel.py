"""Script that compares the Triton kernel with the reference; needs TRITON_INTERPRET=1 or a GPU, and its own process.

It needs `tests` and `src` on PYTHONPATH.
"""

from __future__ import annotations

import torch

from midflight.engine.kernels.gpu import GpuKernels
from midflight.engine.kernels.reference import ReferenceKernels
from unit.engine.test_kernels import GEOMETRIES, paged_batch, with_nan_elsewhere

for num_heads, num_kv_heads, head_dim in GEOMETRIES:
    for softcap, window in ((0.0, 0), (3.0, 0), (0.0, 7), (2.0, 300)):
        batch, cache = paged_batch(num_kv_heads, head_dim, torch.float32, chunk=13)
        query = torch.randn(18, num_heads * head_dim, generator=torch.Generator().manual_seed(1))
        arguments = (query, batch, cache.layers[0], head_dim**-0.5, softcap, window)
        actual, expected = GpuKernels().attend(*arguments), ReferenceKernels().attend(*arguments)
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-2)
        poisoned = with_nan_elsewhere(batch, cache, window).layers[0]
        assert torch.equal(GpuKernels().attend(query, batch, poisoned, *arguments[3:]), actual)
