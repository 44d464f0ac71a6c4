"""What every loss is given and gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The tokens of one microbatch that carry loss; all tensors [M].

    `denominator` counts the whole batch, not the microbatch, so the sum over microbatches is the batch's loss.
    """

    policy_logprobs: Tensor  # with gradient
    behavior_logprobs: Tensor
    advantages: Tensor
    denominator: float


@dataclass(frozen=True, slots=True)
class LossOutput:
    loss: Tensor  # []
