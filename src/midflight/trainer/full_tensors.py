"""Full tensors from their shards, one bucket at a time.

FSDP2 splits every parameter along its first dimension like `torch.chunk`: all ranks have the same number of rows,
except the last ranks, which may have fewer rows or none. Each rank pads its rows to that number and sends all
parameters of a bucket in one message of bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from midflight.models.loading import Named

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DEFAULT_BUCKET_BYTES = 32 << 20
_ALIGNMENT_BYTES = 8  # size of the largest dtype


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a DTensor, without the slow import of that class in processes that shard nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_rows(tensor: Tensor) -> slice | None:
    """Range of this rank's rows, possibly empty; None if the tensor is not sharded."""
    if not is_sharded(tensor):
        return None
    mesh, num_rows = tensor.device_mesh, len(tensor)
    size = _rows_per_rank(num_rows, mesh.size())
    start = min(mesh.get_local_rank() * size, num_rows)
    return slice(start, min(start + size, num_rows))


def full_tensors(tensors: Iterable[Named], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Named]:
    """Yield all full tensors in order on rank 0, and only unsharded tensors on other ranks; a collective.

    All ranks must iterate to the end. At most one bucket, or one larger tensor, is in memory at a time.
    """
    detached = ((name, tensor.detach()) for name, tensor in tensors)
    for bucket in in_buckets(detached, bucket_bytes):
        yield from _gather(bucket) if is_sharded(bucket[0][1]) else bucket


def _rows_per_rank(num_rows: int, num_ranks: int) -> int:
    return -(-num_rows // num_ranks)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def in_buckets(
    tensors: Iterable[Named], bucket_bytes: int, num_bytes: Callable[[Tensor], int] = _bytes_of
) -> Iterator[list[Named]]:
    """Split tensors in order into buckets of at most `bucket_bytes`; a larger tensor gets its own bucket.

    The tensors of a bucket are all sharded or all unsharded.
    """
    bucket: list[Named] = []
    used = 0
    for name, tensor in tensors:
        size = num_bytes(tensor)
        if bucket and (is_sharded(tensor) != is_sharded(bucket[0][1]) or used + size > bucket_bytes):
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += size
    if bucket:
        yield bucket


def _gather(bucket: Sequence[Named]) -> Iterator[Named]:
    """Gather a bucket of sharded tensors on rank 0.

    Suffixes: R ranks, N bytes of one rank's padded rows of all tensors, M bytes of one tensor.
    """
    num_ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    sizes = [_padded_bytes(tensor, num_ranks) for _, tensor in bucket]
    aligned = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
    own_N = torch.empty(sum(aligned), dtype=torch.uint8, device=local(bucket[0][1]).device)
    for (_, tensor), part in zip(bucket, torch.split(own_N, aligned), strict=True):
        rows = local(tensor).flatten().view(torch.uint8)
        part[: len(rows)].copy_(rows)
    all_RN = own_N.new_empty(num_ranks if is_first else 0, len(own_N))
    dist.gather(own_N, list(all_RN.unbind()) if is_first else None, dst=0)
    if not is_first:
        return
    for (name, tensor), size, part_RM in zip(bucket, sizes, torch.split(all_RN, aligned, dim=1), strict=True):
        yield name, part_RM[:, :size].flatten().view(tensor.dtype)[: tensor.numel()].view(tensor.shape)


def _padded_bytes(tensor: Tensor, num_ranks: int) -> int:
    """Size of one rank's rows of a tensor, with padding (bytes)."""
    row_bytes = tensor.numel() // max(len(tensor), 1) * tensor.itemsize
    return _rows_per_rank(len(tensor), num_ranks) * row_bytes
