"""Copy of the trainer's weights that is sent while training goes on.

training thread   fill     waits for: nothing
sending thread    pieces   waits for: the bytes of the next bucket; unblocked by: fill
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from midflight.errors import WeightUpdateError
from midflight.weights.buckets import Bucket, all_bytes


class Snapshot:
    """All tensors of one version in one array of bytes. A bucket can be sent as soon as it is filled."""

    def __init__(self, buckets: Sequence[Bucket], memory: Tensor) -> None:
        self._buckets, self.memory = buckets, memory
        self._changed = threading.Condition()
        self._num_filled = 0
        self._is_abandoned = False

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors, in the order announced. If an error occurs, `pieces` raises, too."""
        source = iter(weights)
        try:
            for bucket in self._buckets:
                fill_bucket(bucket, self.memory[bucket.offset : bucket.offset + bucket.num_bytes], source)
                with self._changed:
                    self._num_filled += 1
                    self._changed.notify_all()
            for _ in source:  # a check of the weights may follow the last one
                pass
        except BaseException:
            with self._changed:
                self._is_abandoned = True
                self._changed.notify_all()
            raise

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes in the order and the parts in which they travel.

        Raises: WeightUpdateError if the snapshot is never completed.
        """
        for number, bucket in enumerate(self._buckets):
            with self._changed:
                self._changed.wait_for(lambda number=number: self._num_filled > number or self._is_abandoned)  # type: ignore[misc]
                if self._num_filled <= number:
                    raise WeightUpdateError("the trainer could not produce these weights")
            for part in bucket.pieces():
                yield self.memory[bucket.offset + part.start : bucket.offset + part.stop]


def new_memory(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """Memory for a snapshot."""
    return torch.empty(all_bytes(buckets), dtype=torch.uint8, device=device)


def streamed(
    buckets: Sequence[Bucket], weights: Iterator[tuple[str, Tensor]], device: torch.device
) -> Iterator[Tensor | None]:
    """Yield the pieces of weights that are produced one by one; memory is needed for one bucket only.

    None is yielded before the memory is written again: all pieces so far must have been sent.
    """
    memory = torch.empty(max((bucket.num_bytes for bucket in buckets), default=0), dtype=torch.uint8, device=device)
    for bucket in buckets:
        fill_bucket(bucket, memory[: bucket.num_bytes], weights)
        for part in bucket.pieces():
            yield memory[part]
        yield None


@torch.no_grad()
def fill_bucket(bucket: Bucket, memory: Tensor, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy the next tensors to their places in a bucket."""
    views = bucket.layout.views(memory)
    for name, view in views.items():
        given, tensor = next(weights)
        assert given == name
        _copy(view, tensor)
        del tensor  # a sharded trainer gathers the next tensors into new memory
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy a tensor. Between CPUs use this thread only: torch's other threads would wait for cores busy sending."""
    if to.is_cpu and source.is_cpu and source.is_contiguous():
        np.copyto(to.reshape(-1).view(torch.uint8).numpy(), source.detach().reshape(-1).view(torch.uint8).numpy())
    else:
        to.copy_(source)
