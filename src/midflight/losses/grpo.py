"""GRPO: group-relative policy optimization."""

from __future__ import annotations

from midflight.losses.clipped import clipped_objective
from midflight.losses.inputs import LossInputs, LossOutput


def grpo(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, max_ratio: float = 5.0) -> LossOutput:
    """-sum_t w_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), r = pi/mu.

    In the paper's terms: 1/G sum_i 1/|o_i| sum_t is the denominator `sequence_mean`, the KL term is `kl_coefficient`
    with `kl_unbiased = false`, and the advantage is `group_mean_std`.

    Shapes: see LossInputs -> loss []. `max_ratio`: see clipped_objective.
    Source: DeepSeekMath (Shao et al. 2024), eq. 3. Here mu is the behavior policy, not the policy of one step ago.
    """
    objective, stopped = clipped_objective(inputs.ratio, inputs.advantages, clip_low, clip_high, max_ratio)
    return LossOutput(-(inputs.token_weights * objective).sum(), {"clipped_fraction": stopped})
