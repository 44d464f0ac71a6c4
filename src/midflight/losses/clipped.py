"""PPO's clipped objective, which grpo, dapo, gspo, ppo and decoupled_ppo are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_objective(
    ratio_M: Tensor, advantages_M: Tensor, clip_low: float, clip_high: float, max_ratio: float
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A) per token, to be maximized; and where the gradient is stopped (1 or 0).

    PPO's minimum bounds r only where the bound makes the objective worse: with a negative advantage a ratio may grow
    for ever, and with it the gradient. There r counts as `max_ratio` at most (dual clip).

    Shapes: ratio_M, advantages_M [M] -> [M], [M].
    Source: PPO (Schulman et al. 2017), eq. 7; dual clip: Ye et al. 2020, eq. 5.
    """
    free = ratio_M.clamp(max=max_ratio) * advantages_M
    clipped = ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantages_M
    too_high = (ratio_M > 1 + clip_high) & (advantages_M > 0)
    too_low = (ratio_M < 1 - clip_low) & (advantages_M < 0)
    stopped = too_high | too_low | ((ratio_M > max_ratio) & (advantages_M < 0))
    return torch.minimum(free, clipped), stopped.detach().to(ratio_M.dtype)
