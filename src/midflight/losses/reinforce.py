"""Truncated importance-weighted REINFORCE."""

from __future__ import annotations

from midflight.losses.inputs import LossInputs, LossOutput


def reinforce(inputs: LossInputs, max_ratio: float = 5.0) -> LossOutput:
    """-sum_t w_t min(c, pi/mu) A_t log pi_t, with the ratio constant in the gradient.

    Shapes: see LossInputs -> loss []. Units: max_ratio is c, a ratio of probabilities.
    Source: PipelineRL, eq. 5 (c = 5); truncation after Ionides 2008.
    Not: PPO's clip, which stops the gradient outside its range. Here a token with a large ratio keeps its gradient.
    """
    weights = inputs.ratio.detach().clamp(max=max_ratio)
    return LossOutput(-(inputs.token_weights * weights * inputs.advantages * inputs.policy_logprobs).sum())
