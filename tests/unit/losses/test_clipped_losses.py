"""Losses with PPO's clipped objective match hand-computed values and gradients, clipped and unclipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from midflight.losses.dapo import dapo
from midflight.losses.decoupled_ppo import decoupled_ppo
from midflight.losses.grpo import grpo
from midflight.losses.gspo import gspo
from midflight.losses.inputs import Loss, LossInputs, LossOutput
from midflight.losses.ppo import ppo
from midflight.losses.reinforce import reinforce


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at_ratios(ratios: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (old + ratios.log()).requires_grad_()


def assert_gives(
    output: LossOutput, policy: torch.Tensor, loss: float, gradient: torch.Tensor, clipped: torch.Tensor
) -> None:
    torch.testing.assert_close(output.loss, torch.tensor(loss, dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad(output.loss, policy)[0], gradient)
    assert torch.equal(output.token_metrics["clipped_fraction"], clipped)


@pytest.mark.parametrize("loss", [grpo, ppo])
def test_clip_stops_ratios_that_moved_far_with_the_advantage(inputs_of: Callable[..., LossInputs], loss: Loss) -> None:
    """Three tokens weigh 1/3 each; ratios in [0.8, 1.2] are not clipped.

    r = 1.5, A = 2:   min(1.5 * 2, 1.2 * 2) = 2.4, clipped
    r = 0.5, A = -1:  min(0.5 * -1, 0.8 * -1) = -0.8, clipped
    r = 1.1, A = 3:   3.3, and d(r A)/d log pi = r A = 3.3
    loss = -(2.4 - 0.8 + 3.3) / 3
    """
    behavior = tensor(-2, -1, -3)
    policy = at_ratios(tensor(1.5, 0.5, 1.1), behavior)
    output = loss(inputs_of(policy, behavior, tensor(2, -1, 3)))
    assert_gives(output, policy, -4.9 / 3, tensor(0, 0, -1.1), tensor(1, 1, 0))


@pytest.mark.parametrize("loss", [grpo, dapo, ppo])
def test_clip_passes_ratios_against_the_advantage_up_to_the_dual_clip(
    inputs_of: Callable[..., LossInputs], loss: Loss
) -> None:
    """Three tokens weigh 1/3 each; the clip ranges of all three losses begin at 0.8 and end below 3.

    r = 8, A = -1:   min(5 * -1, ...) = -5, a constant: dual clip
    r = 3, A = -2:   min(3 * -2, 1.2 * -2) = -6, gradient -6
    r = 0.5, A = 4:  min(0.5 * 4, 0.8 * 4) = 2, gradient 2
    loss = -(-5 - 6 + 2) / 3 = 3
    """
    behavior = tensor(-4, -1, -3)
    policy = at_ratios(tensor(8, 3, 0.5), behavior)
    output = loss(inputs_of(policy, behavior, tensor(-1, -2, 4)))
    assert_gives(output, policy, 3.0, tensor(0, 2, -2 / 3), tensor(1, 0, 0))


def test_dapo_clips_higher_above_than_below(inputs_of: Callable[..., LossInputs]) -> None:
    """Ratios in [0.8, 1.28] are not clipped.

    r = 1.25, A = 2:   2.5, gradient 2.5
    r = 1.5, A = 2:    1.28 * 2 = 2.56, clipped
    r = 0.75, A = -1:  0.8 * -1, clipped
    loss = -(2.5 + 2.56 - 0.8) / 3 = -1.42
    """
    behavior = tensor(-2, -1, -3)
    policy = at_ratios(tensor(1.25, 1.5, 0.75), behavior)
    output = dapo(inputs_of(policy, behavior, tensor(2, 2, -1)))
    assert_gives(output, policy, -1.42, tensor(-2.5 / 3, 0, 0), tensor(0, 1, 1))


def test_caller_sets_the_clip_bounds(inputs_of: Callable[..., LossInputs]) -> None:
    """The range is [0.5, 3] with dual clip at 4.

    r = 2, A = 1:     2, gradient 2
    r = 0.6, A = -1:  -0.6, gradient -0.6
    r = 4.5, A = -1:  4 * -1, a constant
    loss = -(2 - 0.6 - 4) / 3
    """
    behavior = tensor(-2, -1, -3)
    policy = at_ratios(tensor(2, 0.6, 4.5), behavior)
    for loss in (grpo, dapo, ppo):
        output = loss(inputs_of(policy, behavior, tensor(1, -1, -1)), clip_low=0.5, clip_high=2.0, max_ratio=4.0)
        assert_gives(output, policy, 2.6 / 3, tensor(-2 / 3, 0.2, 0), tensor(0, 0, 1))


def test_gspo_uses_the_geometric_mean_ratio_of_a_sequence(inputs_of: Callable[..., LossInputs]) -> None:
    """Two sequences, of two tokens and one, count 1/2 each; sequence ratios in [0.8, 1.2] are not clipped.

    r = 4 and 0.3025, A = 2:  s = sqrt(1.21) = 1.1, s A = 2.2; each token's log pi moves log s by 1/2
    r = 0.5, A = -1:          s = 0.5, clipped: -0.8
    loss = -(2.2 - 0.8) / 2; gradient of each of the first two tokens: -1/2 * 2.2 * 1/2 = -0.55 for any token weights
    """
    behavior = tensor(-4, -1, -3)
    policy = at_ratios(tensor(4, 0.3025, 0.5), behavior)
    inputs = inputs_of(policy, behavior, tensor(2, 2, -1), lengths=[2, 1], token_weights=tensor(0.1, 0.4, 0.5))
    output = gspo(inputs, clip_low=0.2, clip_high=0.2)
    assert_gives(output, policy, -0.7, tensor(-0.55, -0.55, 0), tensor(0, 0, 1))


def test_gspo_clips_whole_sequences(inputs_of: Callable[..., LossInputs]) -> None:
    """Two sequences, of one token and two, count 1/2 each.

    r = 8, A = -1:          s = 8 counts as 5: -5
    r = 36 and 0.25, A = 1: s = 3, clipped: 1.2, although the second token's ratio is far below the range
    loss = -(-5 + 1.2) / 2 = 1.9
    """
    behavior = tensor(-4, -5, -3)
    policy = at_ratios(tensor(8, 36, 0.25), behavior)
    inputs = inputs_of(policy, behavior, tensor(-1, 1, 1), lengths=[1, 2], token_weights=tensor(0.5, 0.25, 0.25))
    output = gspo(inputs, clip_low=0.2, clip_high=0.2)
    assert_gives(output, policy, 1.9, tensor(0, 0, 0), tensor(1, 1, 1))


def test_gspo_clips_ratios_near_one_by_default(inputs_of: Callable[..., LossInputs]) -> None:
    policy = tensor(3.9e-4, 4.1e-4, -2.9e-4, -3.1e-4)
    inputs = inputs_of(policy, tensor(0, 0, 0, 0), tensor(1, 1, -1, -1), lengths=[1, 1, 1, 1])
    assert gspo(inputs).token_metrics["clipped_fraction"].tolist() == [0, 1, 0, 1]


def test_decoupled_ppo_weights_by_one_ratio_and_clips_the_other(inputs_of: Callable[..., LossInputs]) -> None:
    """pi/pi_prox is clipped to [0.8, 1.2]; pi_prox/mu is truncated at 5 and constant in the gradient.

    weight 2,    r = 1.5, A = 2:   2 * 2.4 = 4.8, clipped
    weight 8->5, r = 1.1, A = 3:   5 * 3.3 = 16.5, gradient 16.5
    weight 0.5,  r = 0.5, A = -1:  0.5 * -0.8 = -0.4, clipped
    loss = -20.9 / 3
    """
    behavior = tensor(-4, -5, -3)
    proximal = behavior + tensor(2, 8, 0.5).log()
    policy = at_ratios(tensor(1.5, 1.1, 0.5), proximal)
    output = decoupled_ppo(inputs_of(policy, behavior, tensor(2, 3, -1), proximal_logprobs=proximal))
    assert_gives(output, policy, -20.9 / 3, tensor(0, -5.5, 0), tensor(1, 0, 1))


def test_decoupled_ppo_has_a_dual_clip(inputs_of: Callable[..., LossInputs]) -> None:
    """The dual clip bounds only the first of three tokens.

    weight 1, r = 8, A = -1:    -5, a constant
    weight 2, r = 3, A = -2:    2 * -6
    weight 4, r = 0.5, A = 0.5: 4 * 0.25
    loss = -(-5 - 12 + 1) / 3
    """
    behavior = tensor(-4, -5, -3)
    proximal = behavior + tensor(1, 2, 4).log()
    policy = at_ratios(tensor(8, 3, 0.5), proximal)
    output = decoupled_ppo(inputs_of(policy, behavior, tensor(-1, -2, 0.5), proximal_logprobs=proximal))
    assert_gives(output, policy, 16 / 3, tensor(0, 4, -1 / 3), tensor(1, 0, 0))


def test_decoupled_ppo_with_a_renewed_proximal_policy_equals_reinforce(inputs_of: Callable[..., LossInputs]) -> None:
    generator = torch.Generator().manual_seed(0)
    behavior, advantages, log_ratio = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    policy = (behavior + log_ratio).requires_grad_()
    inputs = inputs_of(policy, behavior, advantages, proximal_logprobs=policy.detach())
    decoupled, plain = decoupled_ppo(inputs, max_ratio=3.0), reinforce(inputs, max_ratio=3.0)
    torch.testing.assert_close(
        torch.autograd.grad(decoupled.loss, policy)[0], torch.autograd.grad(plain.loss, policy)[0]
    )
    assert not decoupled.token_metrics["clipped_fraction"].any()
