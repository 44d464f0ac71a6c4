"""CISPO matches hand-computed values: clipped importance weights bound the gradient and never stop it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from midflight.losses.cispo import cispo
from midflight.losses.inputs import LossInputs
from midflight.losses.reinforce import reinforce


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("sign", [1, -1])
def test_loss_and_gradient_match_hand_computed_values(inputs_of: Callable[..., LossInputs], sign: int) -> None:
    """Ratios 2, 0.5 and 1.1 are clipped to 1.4, 0.7 and 1.1 for both signs of the advantage.

    loss = -(1.4 * 2 * -2 + 0.7 * -1 * -1 + 1.1 * 3 * -0.5) / 3 = 6.55 / 3, d loss / d log pi = -w A / 3
    """
    policy = tensor(-2, -1, -0.5).requires_grad_()
    behavior = policy.detach() - tensor(2, 0.5, 1.1).log()
    output = cispo(inputs_of(policy, behavior, sign * tensor(2, -1, 3)), clip_low=0.3, clip_high=0.4)
    torch.testing.assert_close(output.loss, torch.tensor(sign * 6.55 / 3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(output.loss, policy)
    torch.testing.assert_close(gradient, sign * tensor(-2.8 / 3, 0.7 / 3, -1.1))
    assert output.token_metrics["clipped_fraction"].tolist() == [1, 1, 0]


def test_default_bounds_are_zero_and_five(inputs_of: Callable[..., LossInputs]) -> None:
    policy = tensor(-1, -1, -1).requires_grad_()
    behavior = policy.detach() - tensor(1e-6, 4.9, 8).log()
    output = cispo(inputs_of(policy, behavior, tensor(1, 1, -1), token_weights=tensor(1, 1, 1)))
    (gradient,) = torch.autograd.grad(output.loss, policy)
    torch.testing.assert_close(gradient, tensor(-1e-6, -4.9, 5))
    assert output.token_metrics["clipped_fraction"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("clip_high", [0.2, 2.0, 4.0])
def test_without_a_lower_bound_cispo_equals_reinforce(inputs_of: Callable[..., LossInputs], clip_high: float) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, behavior, advantages = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    inputs = inputs_of(policy.requires_grad_(), behavior, advantages)
    actual, expected = cispo(inputs, clip_low=1.0, clip_high=clip_high).loss, reinforce(inputs, 1 + clip_high).loss
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, policy)[0], torch.autograd.grad(expected, policy)[0])
