"""Roofline of decoding on this machine, from two measured rates.

The roofline leaves out reading keys and values, and sampling, so it is an upper bound.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

# (rows, inner, columns): a cube, and the shapes of a decode step; the fastest counts.
_GEMM_SHAPES = {
    "cpu": ((2048, 2048, 2048), (512, 2048, 2048), (128, 1024, 4096)),
    "cuda": ((8192, 8192, 8192), (4096, 4096, 4096), (512, 8192, 8192)),
}
# Calls between two looks at the clock: on a device, waiting for the end of a call takes about as long as a small call.
_CALLS_AT_A_TIME = {"cpu": 1, "cuda": 20}
_MIN_SECONDS = 0.3
# A bfloat16 checkpoint may be computed in float32, which holds its values exactly, but not vice versa.
_COMPUTE_DTYPES = {"float32": ("float32",), "bfloat16": ("bfloat16", "float32")}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of one compute dtype: floating-point operations per second, bytes per second, bytes."""

    gemm_rate: float
    read_rate: float  # for a block as large as the weights: a model that fits in a cache is read from the cache
    weight_bytes: int


def roofline(sequences: int, parameters: int, ceilings: Mapping[str, Ceilings]) -> float:
    """Return min(B * read rate / weight bytes, GEMM rate / (2 * parameters)) of the best dtype (tokens per second)."""
    return max(
        min(sequences * ceiling.read_rate / ceiling.weight_bytes, ceiling.gemm_rate / (2 * parameters))
        for ceiling in ceilings.values()
    )


def measure_ceilings(dtype: str, parameters: int, num_threads: int, device: str = "cpu") -> dict[str, Ceilings]:
    """Measure, in a new process, the ceilings of every compute dtype that is possible for weights of `dtype`."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, _COMPUTE_DTYPES[dtype], parameters, num_threads, device).result()


def _measure(dtypes: Sequence[str], parameters: int, num_threads: int, device: str) -> dict[str, Ceilings]:
    torch.set_num_threads(num_threads)
    ceilings = {}
    for name in dtypes:
        dtype: torch.dtype = getattr(torch, name)
        weight_bytes = parameters * dtype.itemsize
        ceilings[name] = Ceilings(
            measure_gemm_rate(dtype, device), _read_rate(weight_bytes, torch.device(device)), weight_bytes
        )
    return ceilings


def measure_gemm_rate(dtype: torch.dtype, device: str = "cpu") -> float:
    """Best GEMM rate of several shapes with this process's threads (floating-point operations per second)."""
    on = torch.device(device)
    return max(_gemm_rate(shape, dtype, on) for shape in _GEMM_SHAPES[on.type])


def _gemm_rate(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    rows, inner, columns = shape
    left, right = (torch.randn(size, inner, device=device).to(dtype) for size in (rows, columns))
    return 2 * rows * inner * columns / _best_seconds(lambda: torch.nn.functional.linear(left, right), device)


def _read_rate(num_bytes: int, device: torch.device) -> float:
    """Read rate of a float32 block of `num_bytes`: the faster of a sum and a matrix-vector product (bytes/s)."""
    columns = 1024
    block = torch.ones(max(1, num_bytes // (4 * columns)), columns, device=device)
    vector = torch.ones(columns, device=device)
    seconds = min(_best_seconds(lambda: block.sum(), device), _best_seconds(lambda: torch.mv(block, vector), device))
    return block.nbytes / seconds


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Shortest of at least three measurements: a ceiling is the undisturbed speed of the machine."""
    num_calls = _CALLS_AT_A_TIME[device.type]
    call()
    synchronize(device)
    best, count, started = float("inf"), 0, time.perf_counter()
    while count < 3 or time.perf_counter() - started < _MIN_SECONDS:
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        synchronize(device)
        best = min(best, (time.perf_counter() - begin) / num_calls)
        count += 1
    return best


def synchronize(device: torch.device) -> None:
    """Wait for the work of a CUDA device; the CPU has none to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_core_seconds() -> float | None:
    """Busy time of all cores since the machine started (seconds); None if the kernel does not report it."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, stat.read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
