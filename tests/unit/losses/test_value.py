"""Advantages from values and the value loss match hand-computed values, plain loops and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.losses.denominators import BatchCounts
from midflight.losses.inputs import LossInputs
from midflight.losses.objective import Objective
from midflight.losses.reinforce import reinforce
from midflight.losses.value import generalized_advantages, value_loss
from midflight.models.policy import PackedPolicy
from midflight.preprocess.packing import pack
from midflight.protocols import PolicyOutputs
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_model
from midflight.trainer.inputs import loss_inputs
from midflight.types import RolloutId, Trajectory
from narrowing import present


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        (1.0, [1 - 0.5, 1 - 0.25, 1 - 0.75, -0.5, -0.125]),
        (0.0, [-0.25, 0.5, 0.25, -0.375, -0.125]),
        # From the end: 0.25, 0.5 + 0.25 / 2, -0.25 + 0.625 / 2; in the second sequence -0.125, -0.375 - 0.125 / 2.
        (0.5, [0.0625, 0.625, 0.25, -0.4375, -0.125]),
    ],
)
def test_advantages_match_hand_computed_values(gae_lambda: float, expected: list[float]) -> None:
    """Values are 1/2, 1/4, 3/4 in a sequence with reward 1, then 1/2, 1/8 in a sequence with reward 0.

    delta is -1/4, 1/2, 1 - 3/4 in the first sequence and -3/8, 0 - 1/8 in the second.
    """
    values = tensor(0.5, 0.25, 0.75, 0.5, 0.125)
    advantages = generalized_advantages(values, tensor(1, 0), torch.tensor([0, 0, 0, 1, 1]), gae_lambda)
    assert advantages.tolist() == expected


def plain_loop(values: Sequence[float], reward: float, gae_lambda: float) -> list[float]:
    advantages, advantage = [], 0.0
    for before, after in zip(reversed(values), [reward, *reversed(values[1:])], strict=True):
        advantage = after - before + gae_lambda * advantage
        advantages.append(advantage)
    return advantages[::-1]


numbers = st.floats(-10, 10)


@given(
    st.lists(st.tuples(st.lists(numbers, max_size=20), numbers), min_size=1, max_size=6),
    st.floats(0, 1) | st.sampled_from([0.0, 1.0]),
)
def test_doubling_sum_equals_the_plain_loop(sequences: list[tuple[list[float], float]], gae_lambda: float) -> None:
    """Some sequences have no token that carries loss."""
    values = [value for sequence, _ in sequences for value in sequence]
    index = [number for number, (sequence, _) in enumerate(sequences) for _ in sequence]
    advantages = generalized_advantages(
        tensor(*values), tensor(*(reward for _, reward in sequences)), torch.tensor(index).long(), gae_lambda
    )
    expected = [
        advantage
        for sequence, reward in sequences
        if sequence
        for advantage in plain_loop(sequence, reward, gae_lambda)
    ]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_value_loss_matches_hand_computed_values(inputs_of: Callable[..., LossInputs]) -> None:
    """Values may move by 0.2 from 0. The returns are 1, 0.1, -1 and 0; tokens weigh 1/4; squares are halved.

    v = 0.1:  not clipped: (0.1 - 1)^2 = 0.81, gradient 2 * -0.9
    v = 0.5:  clipped to 0.2: max(0.4^2, 0.1^2) = 0.16, gradient 2 * 0.4: the unclipped error is larger
    v = -0.5: clipped to -0.2: max(0.5^2, 0.8^2) = 0.64, a constant
    v = 0.3:  clipped to 0.2: max(0.3^2, 0.2^2) = 0.09, gradient 2 * 0.3
    """
    values = tensor(0.1, 0.5, -0.5, 0.3).requires_grad_()
    zeros = tensor(0, 0, 0, 0)
    inputs = inputs_of(zeros, zeros, zeros, values=values, proximal_values=zeros, returns=tensor(1, 0.1, -1, 0))
    loss = value_loss(inputs, clip=0.2)
    assert loss.item() == pytest.approx((0.81 + 0.16 + 0.64 + 0.09) / 8)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, tensor(-0.9, 0.4, 0, 0.3) / 4)


@pytest.mark.parametrize("moved", [False, True])
def test_value_head_gradient_matches_finite_differences(moved: bool) -> None:
    """The gradient goes through a real packed model. If `moved`, the proximal values differ and some clips act."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    trajectories = []
    for number, length in enumerate((7, 4, 12)):
        mask, none = np.arange(length) >= 2, np.zeros(length, np.float32)
        token_ids = rng.integers(3, VOCAB_SIZE, length).astype(np.int32)
        trajectories.append(
            Trajectory(RolloutId(number), token_ids, mask, none, np.zeros(length, np.int32), none, float(number), 0)
        )
    (microbatch,) = pack(trajectories, 64)
    policy = PackedPolicy(tiny_model(), temperature=1.0, with_values=True).double()
    head = present(policy.value_head)
    objective = Objective(reinforce, gae_lambda=0.9, value_coefficient=1.0)
    counts = BatchCounts(num_tokens=17, num_sequences=3, max_response_tokens=12)
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=generator))
        scores, old_values = policy(microbatch)
    shift = 0.3 * torch.randn(len(old_values), generator=generator) if moved else 0.0
    proximal = PolicyOutputs(scores.logprobs, scores.entropy, old_values + shift)

    def loss_of(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        changed = {"value_head.weight": weight, "value_head.bias": bias}
        scores, values = torch.func.functional_call(policy, changed, (microbatch,))
        outputs = PolicyOutputs(scores.logprobs, scores.entropy, values)
        return value_loss(loss_inputs(microbatch, outputs, proximal, counts, objective), clip=0.2)

    leaves = [parameter.detach().clone().requires_grad_() for parameter in head.parameters()]
    assert all(gradient.abs().max() > 0.01 for gradient in torch.autograd.grad(loss_of(*leaves), leaves))
    assert torch.autograd.gradcheck(loss_of, leaves)


def test_baseline_that_saw_its_own_token_gives_zero_gradient(inputs_of: Callable[..., LossInputs]) -> None:
    """In a bandit, the value before the token gives the exact policy gradient, the value after the token gives zero.

    All arms are enumerated: the expected reward is sum_a pi(a) q(a). Its gradient and both baselines are exact.
    """
    rewards = tensor(1, -2, 0.5, 3, 0)
    logits = tensor(0.3, -1, 2, 0, 0.5).requires_grad_()
    logprobs = logits.log_softmax(0)
    expected_reward = (logprobs.exp() * rewards).sum()
    (exact,) = torch.autograd.grad(expected_reward, logits, retain_graph=True)

    def ascent(values: torch.Tensor) -> torch.Tensor:
        advantages = generalized_advantages(values, rewards, torch.arange(5), gae_lambda=1.0)
        once_each = {"lengths": [1] * 5, "token_weights": logprobs.exp().detach()}
        loss = reinforce(inputs_of(logprobs, logprobs.detach(), advantages, **once_each)).loss
        return -torch.autograd.grad(loss, logits, retain_graph=True)[0]

    assert exact.abs().max() > 0.1
    torch.testing.assert_close(ascent(expected_reward.detach().expand(5)), exact)
    assert ascent(rewards).abs().max() == 0
