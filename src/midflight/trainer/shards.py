"""Whole tensors from their shards, a bucket of them at a time.

FSDP2 cuts every parameter along its first dimension as `torch.chunk` does: all ranks but the last have as many rows,
and there may be none left for some. Ranks send what they have padded to that many rows, all parameters of a bucket in
one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

DEFAULT_BUCKET_BYTES = 32 << 20

Named = tuple[str, Tensor]


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of it; itself, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> slice | None:
    """Which rows those are, none if start and stop are equal; None: it is not sharded."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, num_rows = tensor.device_mesh, len(tensor)
    size = _rows_per_rank(num_rows, mesh.size())
    start = min(mesh.get_local_rank() * size, num_rows)
    return slice(start, min(start + size, num_rows))


def gathered(tensors: Iterable[Named], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Named]:
    """On rank 0 all tensors whole, in their order; on the others, which have to go through it too, unsharded ones only.

    In memory at a time: one bucket, or one larger tensor.
    """
    for bucket in _buckets(tensors, bucket_bytes):
        yield from _gather(bucket) if isinstance(bucket[0][1], DTensor) else bucket


def _rows_per_rank(num_rows: int, num_ranks: int) -> int:
    return -(-num_rows // num_ranks)


def _buckets(tensors: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """In order: all sharded or none, of one dtype, and no more bytes than fit unless it is a single tensor."""
    bucket: list[Named] = []
    kind, num_bytes = None, 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        if bucket and (kind != (type(tensor), tensor.dtype) or num_bytes + size > bucket_bytes):
            yield bucket
            bucket, num_bytes = [], 0
        kind = type(tensor), tensor.dtype
        bucket.append((name, tensor.detach()))
        num_bytes += size
    if bucket:
        yield bucket


def _gather(bucket: Sequence[Named]) -> Iterator[Named]:
    """Suffixes: R ranks, N elements of one rank's padded rows of all tensors."""
    num_ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    row_sizes = [tensor.numel() // max(len(tensor), 1) for _, tensor in bucket]
    sizes = [_rows_per_rank(len(tensor), num_ranks) * row for (_, tensor), row in zip(bucket, row_sizes, strict=True)]
    first = local(bucket[0][1])
    own_N = first.new_empty(sum(sizes))
    for (_, tensor), part in zip(bucket, torch.split(own_N, sizes), strict=True):
        rows = local(tensor).flatten()
        part[: len(rows)].copy_(rows)
    all_RN = first.new_empty(num_ranks if is_first else 0, len(own_N))
    dist.gather(own_N, list(all_RN.unbind()) if is_first else None, dst=0)
    if not is_first:
        return
    for (name, tensor), part_RM in zip(bucket, torch.split(all_RN, sizes, dim=1), strict=True):
        yield name, part_RM.flatten()[: tensor.numel()].view(tensor.shape)
