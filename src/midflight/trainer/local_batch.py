"""The part of a batch that one rank trains on, and its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midflight.metrics.policy import PolicySums
from midflight.streams.codec import Codec
from midflight.trainer.process_group import ProcessGroup
from midflight.types import Microbatch, TrainingBatch


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """One rank's microbatches of a batch.

    Passes are collectives, so all ranks do equally many. Dummy microbatches contribute nothing to the gradient.
    """

    microbatches: Sequence[Microbatch]
    dummy_microbatches: Sequence[Microbatch]


def local_batch_of(batch: TrainingBatch, rank: int, num_ranks: int) -> LocalBatch:
    """Return the local batch of `rank`; a batch packed for another number of ranks is distributed again."""
    per_rank, everything = batch.microbatches, [each for local in batch.microbatches for each in local]
    if len(per_rank) != num_ranks:
        per_rank = [everything[each::num_ranks] for each in range(num_ranks)]
    num_dummies = max(map(len, per_rank)) - len(per_rank[rank])
    smallest = sorted(everything, key=lambda each: len(each.token_ids))[:1]
    return LocalBatch(per_rank[rank], smallest * num_dummies)


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Measurements of one rank over its local batch."""

    loss: float
    policy: PolicySums
    peak_memory_bytes: int


_CODEC = Codec(LocalResult)


def reduce_results(own: LocalResult, group: ProcessGroup) -> tuple[float, PolicySums, list[int]]:
    """The batch's loss, its sums, and the peak memory of each rank; a collective."""
    results = [_CODEC.decode(message) for message in group.gather(_CODEC.encode(own))]
    return (
        sum(each.loss for each in results),
        PolicySums.of_all([each.policy for each in results]),
        [each.peak_memory_bytes for each in results],
    )
