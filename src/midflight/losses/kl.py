"""Estimators of KL(p || q) from samples of p, given log(q/p) of each sample.

k1 and k3 are unbiased. k2 is biased, but with samples of p the mean of its gradient equals the gradient of the KL. k1
has the largest variance and may be negative. k3 is never negative: it adds to k1 the term q/p - 1, whose expectation is
zero.

Source: Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(log_ratio_M: Tensor) -> Tensor:
    """-log(q/p). Shapes: [M] -> [M]."""
    return -log_ratio_M


def k2(log_ratio_M: Tensor) -> Tensor:
    """(log(q/p))^2 / 2. Shapes: [M] -> [M]."""
    return log_ratio_M.square() / 2


def k3(log_ratio_M: Tensor) -> Tensor:
    """(q/p - 1) - log(q/p), with log ratios clamped to at most 80. Shapes: [M] -> [M]."""
    limited_M = log_ratio_M.clamp(max=80.0)  # larger exponentials overflow float32
    return limited_M.expm1() - limited_M


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
