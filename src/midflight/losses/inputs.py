"""Inputs and outputs of every loss.

Legend: M tokens of one microbatch that carry loss; each belongs to one of its S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# exp(80) is near the largest float32. The gradient of an infinite ratio would be NaN even if the ratio is clipped.
# The square of exp(300), summed over any batch, still fits into a float64, and so does its inverse.
_MAX_LOG_RATIO, _MAX_LOG_RATIO_FLOAT64 = 80.0, 300.0


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """exp of log ratios, clamped to keep the ratio and its gradient finite: at 80 nats, or 300 nats in float64."""
    limit = _MAX_LOG_RATIO_FLOAT64 if log_ratio.dtype == torch.float64 else _MAX_LOG_RATIO
    return log_ratio.clamp(-limit, limit).exp()


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The tokens of one microbatch that carry loss; all tensors [M], log-probabilities in nats.

    A loss is the sum over tokens of `token_weights` times the objective's term of the token. The weights include the
    denominator, which counts the whole batch: the losses of the microbatches add up to the batch's loss for any split.
    """

    policy_logprobs: Tensor  # log pi, with gradient
    behavior_logprobs: Tensor  # log mu
    advantages: Tensor
    token_weights: Tensor
    sequence_index: Tensor  # int64, 0 to S - 1
    num_sequences: int  # S
    entropy: Tensor | None = None  # of pi; with gradient if the objective has an entropy bonus
    ref_logprobs: Tensor | None = None  # of the frozen reference
    proximal_logprobs: Tensor | None = None  # of a recent policy of the trainer
    values: Tensor | None = None  # expected reward before the token, with gradient
    proximal_values: Tensor | None = None  # from the same policy as proximal_logprobs
    returns: Tensor | None = None  # targets of the values

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log mu, with gradient."""
        return self.policy_logprobs - self.behavior_logprobs

    @property
    def ratio(self) -> Tensor:
        """pi/mu, with gradient."""
        return importance_ratio(self.log_ratio)

    def sequence_means(self, values_M: Tensor) -> Tensor:
        """Mean over the loss tokens of each token's sequence, [M]."""
        sums_S = values_M.new_zeros(self.num_sequences).index_add(0, self.sequence_index, values_M)
        counts_S = self.sequence_index.bincount(minlength=self.num_sequences).clamp(min=1)
        return (sums_S / counts_S)[self.sequence_index]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss, and values to log per token; the logged metrics are their means over the batch's tokens."""

    loss: Tensor  # []
    token_metrics: dict[str, Tensor] = field(default_factory=dict)  # each [M], without gradient


Loss = Callable[[LossInputs], LossOutput]
