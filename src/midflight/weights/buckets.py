"""Weights as the byte tensors that a process group broadcasts: large tensors in place, small ones packed together.

Small tensors are packed because a small broadcast costs about as much as a broadcast of 1 MB. Large tensors are not,
because the copy would cost about half as much as the broadcast. Sender and receiver derive the same buckets from the
same announcement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from midflight.types import TensorSpec
from midflight.weights.slot_file import SlotLayout, lay_out

DEFAULT_BUCKET_BYTES = 32 << 20
# gloo has two threads. With at most two transfers in flight, no transfer waits in gloo's queue while its timeout runs,
# and a transfer that fails also ends the other one.
_NUM_IN_FLIGHT = 2


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[SlotLayout]:
    """Group the tensors, in order, into buckets of up to `bucket_bytes`.

    A tensor of at least a quarter of `bucket_bytes` gets a bucket of its own.

    Raises: WeightUpdateError if a name is announced twice or a dtype cannot be sent.
    """
    buckets: list[list[TensorSpec]] = []
    start, is_open = 0, False
    for placed in lay_out(specs).tensors:
        is_small = 4 * placed.num_bytes < bucket_bytes
        if not (is_open and is_small and placed.offset + placed.num_bytes - start <= bucket_bytes):
            buckets.append([])
            start = placed.offset
        buckets[-1].append(placed.spec)
        is_open = is_small
    return [lay_out(bucket) for bucket in buckets]


class Packer:
    """The sender's side: packs weights into buckets, in memory that is reused."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8)] * _NUM_IN_FLIGHT

    @torch.no_grad()
    def pack(
        self, buckets: Sequence[SlotLayout], weights: Mapping[str, Tensor], device: torch.device
    ) -> Iterator[Tensor]:
        """Yield the bytes of each bucket, on the device. They stay valid until `_NUM_IN_FLIGHT` more buckets are taken.

        A bucket of one tensor is a view of that tensor, which must not change during the broadcast.
        """
        for index, layout in enumerate(buckets):
            if len(layout.tensors) == 1:
                tensor = weights[layout.tensors[0].spec.name].detach().to(device).contiguous()
                yield tensor.reshape(-1).view(torch.uint8)
            else:
                slot = index % _NUM_IN_FLIGHT
                if self._memory[slot].device != device or len(self._memory[slot]) < layout.slot_bytes:
                    self._memory[slot] = torch.empty(layout.slot_bytes, dtype=torch.uint8, device=device)
                bucket = self._memory[slot][: _num_bytes(layout)]
                for name, view in layout.views(bucket).items():
                    _copy(view, weights[name])
                yield bucket


class Unpacker:
    """The receiver's side: tensors are views of the memory in which the buckets arrive."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def allocate(self, buckets: Sequence[SlotLayout]) -> list[Tensor]:
        """Return one uint8 tensor per bucket. On a CPU, the memory of the last call is reused.

        Fresh CPU memory costs a page fault every 4 kB, about as much as the transfer. A device has a caching allocator,
        and less memory to keep.
        """
        size = sum(layout.slot_bytes for layout in buckets)
        memory = self._memory
        if len(memory) < size:
            memory = torch.empty(size, dtype=torch.uint8, device=memory.device)
            if memory.is_cpu:
                self._memory = memory
        slots = torch.split(memory[:size], [layout.slot_bytes for layout in buckets])
        return [slot[: _num_bytes(layout)] for slot, layout in zip(slots, buckets, strict=True)]


def broadcast_all(group: Any, tensors: Iterable[Tensor], num_tensors: int, timeout_s: float) -> None:
    """Broadcast the tensors from rank 0, in order; the next tensor is taken from `tensors` while one is in flight.

    Raises: RuntimeError if a broadcast fails or times out.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    in_flight: deque[Callable[[], None]] = deque()

    def start(index: int, tensor: Tensor) -> Callable[[], None]:
        work = group.broadcast([tensor], options)

        def finish() -> None:
            try:
                work.wait(options.timeout)
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)
            except RuntimeError as error:
                raise RuntimeError(f"bucket {index + 1} of {num_tensors}: {error}") from error

        return finish

    for index, tensor in enumerate(tensors):
        in_flight.append(start(index, tensor))
        if len(in_flight) == _NUM_IN_FLIGHT:
            in_flight.popleft()()
    while in_flight:
        in_flight.popleft()()


def _num_bytes(layout: SlotLayout) -> int:
    """Number of bytes without the padding after the last tensor."""
    return max((placed.offset + placed.num_bytes for placed in layout.tensors), default=0)


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy a tensor. Between CPUs use this thread only: torch's other threads would wait for cores busy sending."""
    if to.is_cpu and source.is_cpu and source.is_contiguous():
        np.copyto(to.reshape(-1).view(torch.uint8).numpy(), source.detach().reshape(-1).view(torch.uint8).numpy())
    else:
        to.copy_(source)
