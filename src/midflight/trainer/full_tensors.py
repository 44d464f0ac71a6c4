"""Full tensors on rank 0 from the shards of all ranks, one bucket at a time.

FSDP2 splits every parameter along its first dimension like `torch.chunk`: all ranks have the same number of rows,
except the last ranks, which may have fewer rows or none. Each rank casts its rows and sends them to rank 0, which
receives them at their place in the full tensor. Nothing is packed or padded, so no other buffer is needed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from midflight.models.loading import Named

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DEFAULT_BUCKET_BYTES = 32 << 20


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
    mesh = tensor.device_mesh
    return _rows_of(mesh.get_local_rank(), len(tensor), mesh.size())


def full_tensors(
    tensors: Iterable[Named], dtype: torch.dtype | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[Named]:
    """Yield all full tensors in order on rank 0, and only unsharded tensors on other ranks; a collective.

    All ranks must iterate to the end. At most one bucket, or one larger tensor, is in memory at a time, besides the
    tensors that the caller keeps.

    `dtype`: dtype of the full tensors, to which shards are cast before they are sent; None: their own.
    """

    def num_bytes(tensor: Tensor) -> int:
        return tensor.numel() * (dtype or tensor.dtype).itemsize

    for bucket in in_buckets(tensors, bucket_bytes, num_bytes):
        if not is_sharded(bucket[0][1]):
            yield from ((name, tensor.detach().to(dtype or tensor.dtype)) for name, tensor in bucket)
        elif dist.get_rank() == 0:
            full = _receive(bucket, dtype)
            while full:
                yield full.popleft()  # not kept here, so that the caller can free it
        else:
            _send(bucket, dtype)


def _rows_of(rank: int, num_rows: int, num_ranks: int) -> slice:
    size = -(-num_rows // num_ranks)
    start = min(rank * size, num_rows)
    return slice(start, min(start + size, num_rows))


def in_buckets(
    tensors: Iterable[Named], bucket_bytes: int, num_bytes: Callable[[Tensor], int]
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


def _send(bucket: Sequence[Named], dtype: torch.dtype | None) -> None:
    """Send this rank's rows of a bucket of sharded tensors to rank 0."""
    own = [local(tensor).detach().to(dtype or tensor.dtype).contiguous() for _, tensor in bucket]
    _transfer(dist.P2POp(dist.isend, _bytes(rows), 0, tag=index) for index, rows in enumerate(own) if rows.numel())


def _receive(bucket: Sequence[Named], dtype: torch.dtype | None) -> deque[Named]:
    """Return the full tensors of a bucket of sharded tensors."""
    num_ranks = dist.get_world_size()
    full = [torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=local(tensor).device) for _, tensor in bucket]
    _transfer(
        dist.P2POp(dist.irecv, _bytes(rows), rank, tag=index)
        for index, tensor in enumerate(full)
        for rank in range(1, num_ranks)
        if (rows := tensor[_rows_of(rank, len(tensor), num_ranks)]).numel()
    )
    for tensor, (_, sharded) in zip(full, bucket, strict=True):
        tensor[local_rows(sharded)].copy_(local(sharded).detach())
    return deque((name, tensor) for tensor, (name, _) in zip(full, bucket, strict=True))


def _bytes(rows: Tensor) -> Tensor:
    """Contiguous rows as bytes, which every backend can send."""
    return rows.view(-1).view(torch.uint8)


def _transfer(operations: Iterable[dist.P2POp]) -> None:
    """Run all operations and wait for them."""
    if started := list(operations):
        for work in dist.batch_isend_irecv(started):
            work.wait()
