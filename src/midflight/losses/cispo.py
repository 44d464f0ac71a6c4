"""CISPO: clipped importance-sampling weights that never stop the gradient."""

from __future__ import annotations

from midflight.losses.inputs import LossInputs, LossOutput


def cispo(inputs: LossInputs, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOutput:
    """-sum_t w_t clip(pi/mu, 1 - low, 1 + high) A_t log pi_t, with the ratio constant in the gradient.

    With clip_low = 1 there is no lower bound, as in the paper's experiments. The loss then equals `reinforce` with
    c = 1 + clip_high.

    Shapes: see LossInputs -> loss [].
    Source: MiniMax-M1 (2025), eq. 4 and 5; the paper does not state clip_high.
    """
    ratio = inputs.ratio.detach()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(inputs.token_weights * weights * inputs.advantages * inputs.policy_logprobs).sum()
    return LossOutput(loss, {"clipped_fraction": (weights != ratio).to(ratio.dtype)})
