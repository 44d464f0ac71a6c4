"""Whole tensors from their shards, a bucket of them at a time.

FSDP2 cuts every parameter along its first dimension as `torch.chunk` does: all ranks but the last have as many rows,
and there may be none left for some. Ranks send what they have padded to that many rows, all parameters of a bucket in
one piece of bytes.
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
_ALIGNMENT_BYTES = 8  # of the largest dtype


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a DTensor. Processes that shard nothing never import that class, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of it; itself, if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_rows(tensor: Tensor) -> slice | None:
    """Which rows those are, none if start and stop are equal; None: it is not sharded."""
    if not is_sharded(tensor):
        return None
    mesh, num_rows = tensor.device_mesh, len(tensor)
    size = _rows_per_rank(num_rows, mesh.size())
    start = min(mesh.get_local_rank() * size, num_rows)
    return slice(start, min(start + size, num_rows))


def full_tensors(tensors: Iterable[Named], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Named]:
    """On rank 0 all tensors whole, in their order; on the others, which have to go through it too, unsharded ones only.

    In memory at a time: one bucket, or one larger tensor.
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
    """In order: all sharded or none, and no more bytes than fit unless it is a single tensor."""
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
    """Suffixes: R ranks, N bytes of one rank's padded rows of all tensors, M of one."""
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
    """Of one rank's rows."""
    row_bytes = tensor.numel() // max(len(tensor), 1) * tensor.itemsize
    return _rows_per_rank(len(tensor), num_ranks) * row_bytes
