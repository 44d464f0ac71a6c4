"""What collation saves: sequences packed in the order they come, beside longest first.

Source: Magistral, sec. 3. The latter is what training does, see `preprocess.packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midflight.preprocess.packing import collate

Bins = list[list[int]]  # indices of the sequences in each microbatch


@dataclass(frozen=True, slots=True)
class Packing:
    """How full microbatches are."""

    bins: Bins
    num_tokens: int
    max_tokens: int  # of a microbatch

    @property
    def num_microbatches(self) -> int:
        return len(self.bins)

    @property
    def padding(self) -> int:
        """Tokens that were left empty."""
        return self.num_microbatches * self.max_tokens - self.num_tokens

    @property
    def padding_fraction(self) -> float:
        return self.padding / (self.num_microbatches * self.max_tokens)

    @property
    def lower_bound(self) -> int:
        """Microbatches, if sequences could be cut."""
        return -(-self.num_tokens // self.max_tokens)


@dataclass(frozen=True, slots=True)
class CollationGain:
    in_order: Packing
    greedy: Packing

    @property
    def fewer_microbatches(self) -> float:
        """Share of those in order that greedy collation does without."""
        return 1 - self.greedy.num_microbatches / self.in_order.num_microbatches


def collation_gain(lengths: Sequence[int], max_tokens: int) -> CollationGain:
    """Both packings of the same sequences. Raises: ValueError as `collate`."""
    greedy = collate(lengths, max_tokens)
    bins = (collate_in_order(lengths, max_tokens), greedy)
    return CollationGain(*(Packing(each, sum(lengths), max_tokens) for each in bins))


def collate_in_order(lengths: Sequence[int], max_tokens: int) -> Bins:
    """Each sequence into the last microbatch, or where that has no room for it into a new one.

    No length may be above `max_tokens`.
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
