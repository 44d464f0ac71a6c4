"""GSPO: group sequence policy optimization."""

from __future__ import annotations

from midflight.losses.clipped import clipped_objective
from midflight.losses.inputs import LossInputs, LossOutput, importance_ratio


def gspo(inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4, max_ratio: float = 5.0) -> LossOutput:
    """-sum_t w_t min(s A_t, clip(s, 1 - low, 1 + high) A_t), s = (pi(y)/mu(y))^(1/|y|) of the token's sequence y.

    With the denominator `sequence_mean` each sequence counts once, as in the paper. Clipping keeps or drops whole
    sequences. s stays closer to 1 than the ratios of single tokens, hence the narrow default range.

    Shapes: see LossInputs -> loss [].
    Source: GSPO (Zheng et al. 2025), eq. 5 to 7.
    """
    ratio = importance_ratio(inputs.sequence_means(inputs.log_ratio))
    objective, stopped = clipped_objective(ratio, inputs.advantages, clip_low, clip_high, max_ratio)
    return LossOutput(-(inputs.token_weights * objective).sum(), {"clipped_fraction": stopped})
