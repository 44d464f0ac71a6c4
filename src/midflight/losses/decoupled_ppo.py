"""Decoupled PPO: the proximal policy differs from the behavior policy."""

from __future__ import annotations

from midflight.losses.clipped import clipped_objective
from midflight.losses.inputs import LossInputs, LossOutput, importance_ratio


def decoupled_ppo(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, max_ratio: float = 5.0
) -> LossOutput:
    """-sum_t w_t min(c, pi_prox/mu) min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), r = pi/pi_prox.

    Importance weights correct for mu, which may be old; the clip keeps pi near pi_prox, which is recent. The weight is
    constant in the gradient. Right after pi_prox is renewed, r is 1 and the gradient is the same as in `reinforce`.

    Shapes: see LossInputs, with proximal_logprobs -> loss [].
    Source: Hilton et al. 2022, eq. 2; for stale rollouts: AReaL (Fu et al. 2025), eq. 5. Truncation at c: our addition.
    """
    assert inputs.proximal_logprobs is not None, "decoupled_ppo needs the proximal policy's log-probabilities"
    weights = importance_ratio(inputs.proximal_logprobs - inputs.behavior_logprobs).clamp(max=max_ratio)
    ratio = importance_ratio(inputs.policy_logprobs - inputs.proximal_logprobs)
    objective, stopped = clipped_objective(ratio, inputs.advantages, clip_low, clip_high, max_ratio)
    return LossOutput(-(inputs.token_weights * weights * objective).sum(), {"clipped_fraction": stopped})
