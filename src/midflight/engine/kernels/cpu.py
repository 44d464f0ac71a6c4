"""Kernels in C: compiles cpu.c once for this machine and calls it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from midflight.engine.cache import KVLayer
from midflight.engine.kernels.compiler import compiler_command
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.plan import Batch

# Reassociation lets sums vectorize; -ffast-math would also flush denormals in the whole process.
_FLAGS = "-O3 -shared -fPIC -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math -freciprocal-math"
# Best first; the next is tried if the compiler or the processor does not support an option.
_TARGETS = ("-march=native -mprefer-vector-width=512 -fopenmp", "-march=native -fopenmp", "-fopenmp", "")
_COMPILE_TIMEOUT_S = 120


def cpu_kernels(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> CpuKernels | None:
    """Build the kernels for this head geometry; return None if no C compiler works or the dtype is not supported."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    library = _build(num_heads // num_kv_heads, num_kv_heads, head_dim, dtype is torch.bfloat16)
    return CpuKernels(library) if library else None


class CpuKernels(ReferenceKernels):
    """C implementation of ReferenceKernels, which has the contracts; tensors must be contiguous and on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def linear_layout(self, weight: Tensor, out: Tensor) -> None:
        if weight.dtype not in (torch.float32, torch.bfloat16) or not weight.is_contiguous() or out.stride(1) != 1:
            super().linear_layout(weight, out)
            return
        is_bf16 = weight.dtype is torch.bfloat16
        self._library.transpose(
            _pointer(weight), is_bf16, _pointer(out), _long(out.stride(0)), *map(_long, weight.shape), _threads()
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._library.rms_norm(
            _pointer(x), _pointer(weight), _float(eps), _pointer(out), *map(_long, x.shape), _threads()
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, width = gate_up.shape
        out = gate_up.new_empty(num_tokens, width // 2)
        self._library.silu_mul(_pointer(gate_up), _pointer(out), _long(num_tokens), _long(width // 2), _threads())
        return out

    def rope_and_store(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        batch: Batch,
        layer: KVLayer,
    ) -> Tensor:
        """Same as the reference, but overwrites `qkv`: the returned queries are a view into it."""
        query_norm, key_norm = map(_pointer, norms) if norms else (None, None)
        self._library.rope_and_store(
            _pointer(qkv), *map(_pointer, rope), query_norm, key_norm, _float(eps), _pointer(batch.positions),
            _pointer(batch.slot_mapping), _pointer(layer.keys), _pointer(layer.values), _long(len(qkv)), _threads(),
        )  # fmt: skip
        return qkv[:, : qkv.shape[1] - 2 * layer.num_kv_heads * layer.head_dim]

    def store(self, key: Tensor, value: Tensor, batch: Batch, layer: KVLayer) -> None:
        key, value = key.contiguous(), value.contiguous()
        self._library.store(
            _pointer(key), _pointer(value), _pointer(batch.slot_mapping), _pointer(layer.keys), _pointer(layer.values),
            _long(len(key)), _threads(),
        )  # fmt: skip

    def attend(
        self, query: Tensor, batch: Batch, layer: KVLayer, scale: float, softcap: float = 0.0, window: int = 0
    ) -> Tensor:
        out = query.new_empty(query.shape)
        self._library.attend(
            _pointer(query), _long(query.stride(0)), _pointer(layer.keys), _pointer(layer.values),
            _pointer(batch.tables), _long(batch.tables.stride(0)), _pointer(batch.slots), _pointer(batch.positions),
            _float(scale), _float(softcap), _long(window), _pointer(out), _long(len(query)), _threads(),
        )  # fmt: skip
        return out

    def sample(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Same as the reference; logits, temperatures and uniforms must be float32."""
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits))
        self._library.sample(
            _pointer(logits), _pointer(temperatures), _pointer(uniforms), _pointer(token_ids), _pointer(logprobs),
            *map(_long, logits.shape), _threads(),
        )  # fmt: skip
        return token_ids, logprobs


_long, _float = ctypes.c_long, ctypes.c_float


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _threads() -> int:
    return torch.get_num_threads()


@functools.cache
def _build(group_size: int, num_kv_heads: int, head_dim: int, bf16: bool) -> ctypes.CDLL | None:
    command = compiler_command()
    if not command:
        return None
    source = resources.files(__package__).joinpath("cpu.c").read_bytes()
    defines = [f"-DG={group_size}", f"-DK={num_kv_heads}", f"-DE={head_dim}", *(["-DBF16"] if bf16 else [])]
    directory = _cache_directory()
    # The processor is part of the file name, because several machines may share a home directory.
    identity = b"\0".join([source, *map(str.encode, [*command, *defines, _FLAGS, *_TARGETS]), _processor().encode()])
    library = directory / f"{hashlib.sha256(identity).hexdigest()[:32]}.so"
    if not library.exists() and not _compile(command, defines, source, library):
        return None
    return ctypes.CDLL(str(library))


def _compile(command: list[str], defines: list[str], source: bytes, library: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        path, built = Path(scratch) / "cpu.c", Path(scratch) / "cpu.so"
        path.write_bytes(source)
        for target in _TARGETS:
            options = [*shlex.split(_FLAGS), *shlex.split(target), *defines]
            try:
                subprocess.run(
                    [*command, *options, str(path), "-o", str(built), "-lm"],
                    check=True,
                    capture_output=True,
                    timeout=_COMPILE_TIMEOUT_S,
                )
            except (OSError, subprocess.SubprocessError):
                continue
            os.replace(built, library)  # atomic, because two processes may compile at the same time
            return True
    return False


def _cache_directory() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "midflight" / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        directory = Path(tempfile.mkdtemp(prefix="midflight-kernels-"))
    return directory


def _processor() -> str:
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return ""
    return flags
