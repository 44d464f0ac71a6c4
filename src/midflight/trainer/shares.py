"""What each rank does of a batch, and what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midflight.metrics.policy import PolicySums
from midflight.streams.codec import Codec
from midflight.trainer.ranks import Ranks
from midflight.types import Microbatch, TrainingBatch


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's microbatches of a batch. Passes are collectives, so all ranks do as many: fillers count nothing."""

    microbatches: Sequence[Microbatch]
    fillers: Sequence[Microbatch]


def share_of(batch: TrainingBatch, rank: int, num_ranks: int) -> Share:
    """The shares of a batch that was made for another number of ranks are dealt out anew."""
    shares, everything = batch.microbatches, [each for share in batch.microbatches for each in share]
    if len(shares) != num_ranks:
        shares = [everything[each::num_ranks] for each in range(num_ranks)]
    num_fillers = max(map(len, shares)) - len(shares[rank])
    smallest = sorted(everything, key=lambda each: len(each.token_ids))[:1]
    return Share(shares[rank], smallest * num_fillers)


@dataclass(frozen=True, slots=True)
class ShareResult:
    """What one rank measured while it trained on its share."""

    loss: float
    policy: PolicySums
    peak_memory_bytes: int


_CODEC = Codec(ShareResult)


def of_all_ranks(own: ShareResult, ranks: Ranks) -> tuple[float, PolicySums, list[int]]:
    """The batch's loss, its sums, and the peak memory of each rank; a collective."""
    results = [_CODEC.decode(message) for message in ranks.gather(_CODEC.encode(own))]
    return (
        sum(each.loss for each in results),
        PolicySums.of_all([each.policy for each in results]),
        [each.peak_memory_bytes for each in results],
    )
