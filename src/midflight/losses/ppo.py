"""PPO: proximal policy optimization with a value function."""

from __future__ import annotations

from midflight.losses.grpo import grpo
from midflight.losses.inputs import LossInputs, LossOutput


def ppo(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, max_ratio: float = 5.0) -> LossOutput:
    """Clipped objective with one advantage per token, computed from values (losses/value.py learns the values).

    Shapes: see LossInputs -> loss [].
    Source: PPO (Schulman et al. 2017), eq. 7 and 9.
    """
    return grpo(inputs, clip_low, clip_high, max_ratio)
