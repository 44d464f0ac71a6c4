"""Truncated importance-weighted REINFORCE."""

from __future__ import annotations

from midflight.losses.inputs import LossInputs, LossOutput


def reinforce(inputs: LossInputs, max_ratio: float = 5.0) -> LossOutput:
    """-sum_t min(c, pi/mu) * A_t * log pi_t / denominator, the ratio held constant in the gradient.

    Shapes: see LossInputs -> loss []. Units: max_ratio is c, a ratio of probabilities.
    Source: PipelineRL, eq. 5 (c = 5); truncation after Ionides 2008.
    Not: PPO's clip, which stops the gradient outside its range; here a large ratio only stops growing.
    """
    ratio = (inputs.policy_logprobs.detach() - inputs.behavior_logprobs).exp().clamp(max=max_ratio)
    return LossOutput(-(ratio * inputs.advantages * inputs.policy_logprobs).sum() / inputs.denominator)
