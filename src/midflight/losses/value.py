"""The value function: the expected reward of a sequence before each of its tokens, and the loss to learn it.

v(x, y_<t) must not see token t, because it is the baseline for token t. PipelineRL's eq. 4 prints v(x, y_<=t). If that
included token t, an exact value function would equal the expected reward given the token, and the gradient would be
zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from midflight.losses.inputs import LossInputs


def generalized_advantages(values_M: Tensor, rewards_S: Tensor, sequence_index_M: Tensor, gae_lambda: float) -> Tensor:
    """A_t = sum_k lambda^k delta_{t+k}, delta_t = v_{t+1} - v_t, or R - v_t at a sequence's last token; no discount.

    With lambda = 1, A_t = R - v(x, y_<t). The sum is over the tokens of the sequence that carry loss. It takes
    log2(longest) steps: each step doubles the number of summed terms.

    Shapes: values_M [M], rewards_S [S], sequence_index_M [M] int64, ascending -> [M].
    Source: Schulman et al. 2016, eq. 16; PipelineRL, eq. 4.
    """
    if not len(values_M):
        return values_M
    follows_M = sequence_index_M[1:] == sequence_index_M[:-1]
    next_values_M = torch.cat([torch.where(follows_M, values_M[1:], rewards_S[sequence_index_M[:-1]]),
                               rewards_S[sequence_index_M[-1:]]])  # fmt: skip
    sums_M = next_values_M - values_M
    shift, longest = 1, int(sequence_index_M.bincount().max())
    while shift < longest:
        same_M = sequence_index_M[shift:] == sequence_index_M[:-shift]
        later_M = torch.where(same_M, sums_M[shift:], 0.0) * gae_lambda**shift
        sums_M = torch.cat([sums_M[:-shift] + later_M, sums_M[-shift:]])
        shift *= 2
    return sums_M


def value_loss(inputs: LossInputs, clip: float) -> Tensor:
    """sum_t w_t max((v - R)^2, (v_clipped - R)^2) / 2, with v_clipped within `clip` of the proximal value.

    Shapes: see LossInputs, with values, proximal_values and returns -> [].
    Source: PipelineRL, eq. 5 (squared error); clipping: Schulman et al.'s PPO implementation (Huang et al. 2022, 9).
    """
    assert inputs.values is not None
    assert inputs.proximal_values is not None
    assert inputs.returns is not None
    moved = (inputs.values - inputs.proximal_values).clamp(-clip, clip)
    free = (inputs.values - inputs.returns).square()
    clipped = (inputs.proximal_values + moved - inputs.returns).square()
    return (inputs.token_weights * torch.maximum(free, clipped)).sum() / 2
