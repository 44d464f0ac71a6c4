"""A user-defined loss: tapered off-policy REINFORCE, token by token.

midflight train cpu_demo loss.type=my_loss:tapered    # in this directory
"""

from __future__ import annotations

import torch

from midflight.losses.inputs import LossInputs, LossOutput


def tapered(inputs: LossInputs, max_negative_ratio: float = 1.0) -> LossOutput:
    """-sum_t w_t r_t A_t log pi_t, with r_t = 1 if A_t >= 0, otherwise min(c, pi/mu), constant in the gradient.

    Good responses have full weight at any age. Bad responses lose weight as the policy moves away from them, so their
    gradient stays bounded without a KL penalty.

    Shapes: see LossInputs -> loss []. Units: max_negative_ratio is c, a ratio of probabilities.
    Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE", which takes the ratio of the whole response.
    """
    bad = inputs.advantages < 0
    tapered_ratio = inputs.ratio.detach().clamp(max=max_negative_ratio)
    weights = torch.where(bad, tapered_ratio, 1.0)
    loss = -(inputs.token_weights * weights * inputs.advantages * inputs.policy_logprobs).sum()
    return LossOutput(loss, {"tapered": (bad & (tapered_ratio < 1)).float()})
