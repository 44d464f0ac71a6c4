"""PPO's clipped objective, shared by grpo, dapo, gspo, ppo and decoupled_ppo."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_objective(
    ratio_M: Tensor, advantages_M: Tensor, clip_low: float, clip_high: float, max_ratio: float
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A) per token, to be maximized, and a mask of stopped gradients (1 or 0).

    PPO's minimum bounds r only where the bound makes the objective worse. With a negative advantage, the ratio and the
    gradient could therefore grow without limit; there r counts as at most `max_ratio` (dual clip).

    Shapes: ratio_M, advantages_M [M] -> [M], [M].
    Source: PPO (Schulman et al. 2017), eq. 7; dual clip: Ye et al. 2020, eq. 5.
    """
    free = ratio_M.clamp(max=max_ratio) * advantages_M
    clipped = ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantages_M
    too_high = (ratio_M > 1 + clip_high) & (advantages_M > 0)
    too_low = (ratio_M < 1 - clip_low) & (advantages_M < 0)
    stopped = too_high | too_low | ((ratio_M > max_ratio) & (advantages_M < 0))
    return torch.minimum(free, clipped), stopped.detach().to(ratio_M.dtype)
