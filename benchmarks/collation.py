"""Savings of collation: packing longest first, compared with packing in order of arrival.

Source: Magistral, sec. 3. Training packs longest first, see `preprocess.packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midflight.preprocess.packing import collate

Bins = list[list[int]]  # indices of the sequences in each microbatch


@dataclass(frozen=True, slots=True)
class Packing:
    """Microbatches of one way of packing, and how full they are."""

    bins: Bins
    num_tokens: int
    max_tokens: int  # per microbatch

    @property
    def num_microbatches(self) -> int:
        return len(self.bins)

    @property
    def padding(self) -> int:
        """Unused token positions in all microbatches."""
        return self.num_microbatches * self.max_tokens - self.num_tokens

    @property
    def padding_fraction(self) -> float:
        return self.padding / (self.num_microbatches * self.max_tokens)

    @property
    def lower_bound(self) -> int:
        """Smallest number of microbatches if sequences could be split."""
        return -(-self.num_tokens // self.max_tokens)


@dataclass(frozen=True, slots=True)
class CollationGain:
    in_order: Packing
    greedy: Packing

    @property
    def fewer_microbatches(self) -> float:
        """Share of microbatches that greedy collation saves, relative to packing in order."""
        return 1 - self.greedy.num_microbatches / self.in_order.num_microbatches


def collation_gain(lengths: Sequence[int], max_tokens: int) -> CollationGain:
    """Pack the same sequences both ways. Raises: ValueError as `collate`."""
    greedy = collate(lengths, max_tokens)
    bins = (collate_in_order(lengths, max_tokens), greedy)
    return CollationGain(*(Packing(packed, sum(lengths), max_tokens) for packed in bins))


def collate_in_order(lengths: Sequence[int], max_tokens: int) -> Bins:
    """Put each sequence into the last microbatch, or into a new one if the last has no room.

    No length may exceed `max_tokens`.
    """
    bins: Bins = []
    room = 0
    for index, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(index)
        room -= length
    return bins
