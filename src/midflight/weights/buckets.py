"""Weights as the bytes that a process group carries: tensors in buckets, buckets in pieces.

A tensor lies in one bucket, so a receiver needs memory for a few buckets only. A bucket travels in pieces, so an engine
passes on the first bytes of a large tensor before the last ones arrive. Sender and receivers derive the same buckets
and pieces from the same announcement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from midflight.types import TensorSpec
from midflight.weights.slot_file import SlotLayout, lay_out

DEFAULT_BUCKET_BYTES = 32 << 20
# Smaller pieces cost more calls; larger ones leave the cache between arrival, passing on and use.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors as one flat array of bytes; each tensor starts at a multiple of 64."""

    layout: SlotLayout
    offset: int  # of this bucket in an array of all buckets (bytes)
    num_bytes: int  # without padding after the last tensor

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[slice]:
        """Yield the ranges of bytes that travel together, in order."""
        for start in range(0, self.num_bytes, piece_bytes):
            yield slice(start, min(start + piece_bytes, self.num_bytes))


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a bucket in a ring: the offset (bytes), and the number of buckets that must have left before."""

    offset: int
    num_left: int


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Group the tensors, in order, into buckets of up to `bucket_bytes`; a larger tensor gets its own bucket.

    Raises: WeightUpdateError if a name is announced twice or a dtype cannot be sent.
    """
    groups: list[list[TensorSpec]] = []
    offsets: list[int] = []
    for placed in lay_out(specs).tensors:
        if not groups or placed.offset + placed.num_bytes - offsets[-1] > bucket_bytes:
            groups.append([])
            offsets.append(placed.offset)
        groups[-1].append(placed.spec)
    layouts = [lay_out(group) for group in groups]
    return [Bucket(layout, offset, _num_bytes(layout)) for layout, offset in zip(layouts, offsets, strict=True)]


def all_bytes(buckets: Sequence[Bucket]) -> int:
    """Size of an array of all buckets (bytes)."""
    return buckets[-1].offset + buckets[-1].layout.slot_bytes if buckets else 0


def place_in_ring(buckets: Sequence[Bucket], bucket_bytes: int) -> tuple[list[Place], int]:
    """Return the place of each bucket in a ring and the size of the ring (bytes).

    The ring has room for the largest bucket and another one, and for at least three of `bucket_bytes`, if the buckets
    are as large.
    """
    sizes = [bucket.layout.slot_bytes for bucket in buckets]
    capacity = min(sum(sizes), max(max(sizes, default=0) + bucket_bytes, 3 * bucket_bytes))
    places: list[Place] = []
    end = 0
    for index, size in enumerate(sizes):
        offset = end if end + size <= capacity else 0
        end = offset + size
        overlapping = (
            earlier
            for earlier in range(index - 1, -1, -1)
            if places[earlier].offset < end and offset < places[earlier].offset + sizes[earlier]
        )
        places.append(Place(offset, next(overlapping, -1) + 1))
    return places, capacity


def _num_bytes(layout: SlotLayout) -> int:
    """Number of bytes without the padding after the last tensor."""
    return max((placed.offset + placed.num_bytes for placed in layout.tensors), default=0)
