"""Denominators of the sum over tokens, as one weight per token. They count the whole batch, never a microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Counts of one optimizer step, over all microbatches and ranks."""

    num_tokens: int  # tokens that carry loss
    num_sequences: int  # rollouts, including rollouts without loss
    max_response_tokens: int  # largest allowed length of a response


def token_weights(denominator: str, counts: BatchCounts, sequence_index_M: Tensor, num_sequences: int) -> Tensor:
    """Factor of every token's term in the loss.

    tokens         1 / tokens of the batch                          DAPO: long responses weigh more
    sequences      1 / sequences of the batch                       PipelineRL: equal to `tokens` up to the mean length
    sequence_mean  1 / (tokens of its sequence * sequences)         GRPO: every response weighs the same
    constant       1 / (longest possible response * sequences)      Dr. GRPO: independent of response lengths

    Shapes: sequence_index_M [M] int64 of the microbatch's `num_sequences` -> [M] float32.
    """
    if denominator == "sequence_mean":
        lengths_S = sequence_index_M.bincount(minlength=num_sequences)
        return 1.0 / (lengths_S[sequence_index_M].float() * counts.num_sequences)
    divisor = {
        "tokens": max(counts.num_tokens, 1),
        "sequences": counts.num_sequences,
        "constant": counts.num_sequences * counts.max_response_tokens,
    }[denominator]
    return sequence_index_M.new_ones(len(sequence_index_M)).float() / divisor
