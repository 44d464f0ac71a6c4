"""Truncated importance-weighted REINFORCE matches hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from midflight.losses.inputs import LossInputs
from midflight.losses.reinforce import reinforce


def test_loss_and_gradient_match_hand_computed_values(inputs_of: Callable[..., LossInputs]) -> None:
    """Ratios are 2, 0.5 and 8 (truncated to 5). They carry no gradient, so d loss / d logpi = -min(c, r) * A / n."""
    behavior = torch.tensor([-2.0, -1.0, -3.0], dtype=torch.float64)
    ratios = torch.tensor([2.0, 0.5, 8.0], dtype=torch.float64)
    policy = (behavior + ratios.log()).requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    loss = reinforce(
        inputs_of(policy, behavior, advantages, token_weights=torch.full_like(behavior, 0.25)), max_ratio=5.0
    ).loss
    log2 = math.log(2)
    expected = -(2 * 1 * (-2 + log2) + 0.5 * -0.5 * (-1 - log2) + 5 * 2 * (-3 + 3 * log2)) / 4
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.0625, -2.5], dtype=torch.float64))


def test_default_truncation_is_five(inputs_of: Callable[..., LossInputs]) -> None:
    policy = torch.zeros(1, requires_grad=True)
    loss = reinforce(inputs_of(policy, torch.tensor([-10.0]), torch.tensor([1.0]))).loss
    (gradient,) = torch.autograd.grad(loss, policy)
    assert gradient.tolist() == [-5.0]
