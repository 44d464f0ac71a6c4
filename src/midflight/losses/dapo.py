"""DAPO: decoupled clip and dynamic sampling policy optimization."""

from __future__ import annotations

from midflight.losses.grpo import grpo
from midflight.losses.inputs import LossInputs, LossOutput


def dapo(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28, max_ratio: float = 5.0) -> LossOutput:
    """GRPO's loss with a higher upper clip bound (clip-higher) and the denominator `tokens`: long responses weigh more.

    The other parts of DAPO are recipe keys: `batch.dynamic_sampling`, `reward.overlong_buffer`, `batch.mask_truncated`.

    Shapes: see LossInputs -> loss [].
    Source: DAPO (Yu et al. 2025), eq. 8.
    """
    return grpo(inputs, clip_low, clip_high, max_ratio)
