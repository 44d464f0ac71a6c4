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

    Forward and backward passes are collectives, so all ranks need the same number of passes. Dummy microbatches fill up
    the number and contribute nothing to the gradient.
    """

    microbatches: Sequence[Microbatch]
    dummy_microbatches: Sequence[Microbatch]


def local_batch_of(batch: TrainingBatch, rank: int, num_ranks: int) -> LocalBatch:
    """Return the local batch of `rank`; a batch packed for another number of ranks is distributed again."""
    per_rank, microbatches = batch.microbatches, [each for local in batch.microbatches for each in local]
    if len(per_rank) != num_ranks:
        per_rank = [microbatches[start::num_ranks] for start in range(num_ranks)]
    num_dummies = max(map(len, per_rank)) - len(per_rank[rank])
    smallest = sorted(microbatches, key=lambda microbatch: len(microbatch.token_ids))[:1]
    return LocalBatch(per_rank[rank], smallest * num_dummies)


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Measurements of one rank over its local batch."""

    loss: float
    policy: PolicySums
    peak_memory_bytes: int
    changed: bool  # an optimizer step changed a weight


_CODEC = Codec(LocalResult)


def reduce_results(own: LocalResult, group: ProcessGroup) -> tuple[float, PolicySums, list[int], bool]:
    """Combine the results of all ranks: loss, policy sums, peak memory by rank (bytes), changed; a collective."""
    results = [_CODEC.decode(message) for message in group.gather(_CODEC.encode(own))]
    return (
        sum(result.loss for result in results),
        PolicySums.of_all([result.policy for result in results]),
        [result.peak_memory_bytes for result in results],
        any(result.changed for result in results),
    )
