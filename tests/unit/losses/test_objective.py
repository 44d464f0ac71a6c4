"""KL, entropy, value loss and masks apply to every policy loss, in value and gradient."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from midflight.losses.cispo import cispo
from midflight.losses.dapo import dapo
from midflight.losses.decoupled_ppo import decoupled_ppo
from midflight.losses.grpo import grpo
from midflight.losses.gspo import gspo
from midflight.losses.inputs import Loss, LossInputs
from midflight.losses.kl import KL_ESTIMATORS, k2
from midflight.losses.objective import Objective
from midflight.losses.ppo import ppo
from midflight.losses.reinforce import reinforce
from narrowing import present

LOSSES: dict[str, Loss] = {
    "reinforce": reinforce,
    "cispo": cispo,
    "grpo": grpo,
    "dapo": dapo,
    "gspo": gspo,
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
}
every_loss = pytest.mark.parametrize("policy_loss", LOSSES.values(), ids=LOSSES)
NUM_TOKENS = 12


@pytest.fixture
def inputs(inputs_of: Callable[..., LossInputs]) -> LossInputs:
    """Three sequences with every optional input of a loss, and a different weight for each token."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)

    behavior = normal() - 3
    return inputs_of(
        (behavior + normal()).requires_grad_(),
        behavior,
        normal(),
        lengths=[3, 4, 5],
        token_weights=normal().abs() + 0.1,
        entropy=normal().abs().requires_grad_(),
        ref_logprobs=behavior + 0.5 * normal(),
        proximal_logprobs=behavior + 0.5 * normal(),
        values=normal().requires_grad_(),
        proximal_values=normal(),
        returns=normal(),
    )


def value_and_gradients(loss: Tensor, inputs: LossInputs) -> list[Tensor]:
    leaves = [inputs.policy_logprobs, present(inputs.entropy), present(inputs.values)]
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients]


def kl_by_hand(inputs: LossInputs) -> Tensor:
    """min(5, pi/mu) (ref/pi - 1 - log(ref/pi)), written out."""
    ratio = (inputs.policy_logprobs - inputs.behavior_logprobs).exp()
    reference = present(inputs.ref_logprobs)
    ref_ratio = reference.exp() / inputs.policy_logprobs.exp()
    estimate = ref_ratio - 1 - reference + inputs.policy_logprobs
    return 0.3 * (inputs.token_weights * torch.where(ratio < 5, ratio, 5.0) * estimate).sum()


def kl_of_grpo_by_hand(inputs: LossInputs) -> Tensor:
    """ref/pi - 1 - log(ref/pi), without importance weights."""
    log_ratio = present(inputs.ref_logprobs) - inputs.policy_logprobs
    return 0.3 * (inputs.token_weights * (log_ratio.exp() - 1 - log_ratio)).sum()


def entropy_by_hand(inputs: LossInputs) -> Tensor:
    return -0.2 * (inputs.token_weights * present(inputs.entropy)).sum()


def values_by_hand(inputs: LossInputs) -> Tensor:
    values, proximal, returns = present(inputs.values), present(inputs.proximal_values), present(inputs.returns)
    errors = [(each - returns) ** 2 for each in (values, values.clamp(proximal - 0.4, proximal + 0.4))]
    return 0.7 * (inputs.token_weights * torch.stack(errors).amax(0)).sum() / 2


TERMS: dict[str, tuple[dict[str, Any], Callable[[LossInputs], Tensor]]] = {
    "kl": ({"kl_coefficient": 0.3}, kl_by_hand),
    "kl of grpo": ({"kl_coefficient": 0.3, "kl_unbiased": False}, kl_of_grpo_by_hand),
    "entropy": ({"entropy_coefficient": 0.2}, entropy_by_hand),
    "values": ({"gae_lambda": 1.0, "value_coefficient": 0.7, "value_clip": 0.4}, values_by_hand),
}


@every_loss
@pytest.mark.parametrize("names", [*((name,) for name in TERMS), ("kl", "entropy", "values")], ids="+".join)
def test_every_term_is_added_to_every_loss(policy_loss: Loss, names: tuple[str, ...], inputs: LossInputs) -> None:
    options = {key: value for name in names for key, value in TERMS[name][0].items()}
    alone = policy_loss(inputs).loss
    expected = value_and_gradients(alone + sum(TERMS[name][1](inputs) for name in names), inputs)
    total = value_and_gradients(Objective(policy_loss, **options)(inputs).loss, inputs)
    torch.testing.assert_close(total, expected)
    before = value_and_gradients(alone, inputs)
    differences = [(one - other).abs().max() for one, other in zip(total, before, strict=True)]
    assert differences[0] > 0.01
    touched = {"kl": 1, "kl of grpo": 1, "entropy": 2, "values": 3}
    assert all(differences[touched[name]] > 0.01 for name in names)


@every_loss
def test_objective_without_terms_equals_the_loss(policy_loss: Loss, inputs: LossInputs) -> None:
    plain, output = policy_loss(inputs), Objective(policy_loss)(inputs)
    assert torch.equal(output.loss, plain.loss)
    assert output.token_metrics.keys() == plain.token_metrics.keys()


@every_loss
def test_zero_kl_coefficient_only_measures_the_kl(policy_loss: Loss, inputs: LossInputs) -> None:
    output = Objective(policy_loss, kl_coefficient=0.0)(inputs)
    assert torch.equal(output.loss, policy_loss(inputs).loss)
    measured = output.token_metrics["kl/reference"]
    assert not measured.requires_grad
    torch.testing.assert_close(0.3 * (inputs.token_weights * measured).sum(), kl_by_hand(inputs).detach())


@every_loss
def test_token_metrics_hold_no_graph(policy_loss: Loss, inputs: LossInputs) -> None:
    output = Objective(policy_loss, kl_coefficient=0.3, token_mask=(0.5, 2.0), gae_lambda=1.0)(inputs)
    assert {"kl/reference", "ratio/masked_fraction", "value/mean"} <= output.token_metrics.keys()
    for metric in output.token_metrics.values():
        assert not metric.requires_grad
        assert metric.shape == (NUM_TOKENS,)


# --- masks --------------------------------------------------------------------------------------------------------


def with_ratios(inputs: LossInputs, ratios: list[float], lengths: list[int]) -> LossInputs:
    ratio = torch.tensor(ratios, dtype=torch.float64)
    sizes = torch.tensor(lengths)
    return dataclasses.replace(
        inputs,
        policy_logprobs=(inputs.behavior_logprobs + ratio.log()).requires_grad_(),
        sequence_index=torch.arange(len(sizes)).repeat_interleave(sizes),
        num_sequences=len(sizes),
    )


MASKED_TERMS = functools.partial(Objective, kl_coefficient=0.3, entropy_coefficient=0.2)
RATIOS = [1, 9, 0.1, 8, 0.125, 1.1, 7.9, 0.13, 0.12, 8.1, 2, 0.9]


@every_loss
def test_mask_removes_only_the_gradients_of_masked_tokens(policy_loss: Loss, inputs: LossInputs) -> None:
    """Each token is a sequence, so no loss couples tokens. The ends of the range are allowed."""
    inputs = with_ratios(inputs, RATIOS, [1] * NUM_TOKENS)
    output = MASKED_TERMS(policy_loss, token_mask=(0.125 - 1e-9, 8.0 + 1e-9))(inputs)
    free = value_and_gradients(MASKED_TERMS(policy_loss)(inputs).loss, inputs)
    masked = value_and_gradients(output.loss, inputs)
    out = torch.tensor([1, 2, 8, 9])
    allowed = torch.ones(NUM_TOKENS, dtype=torch.float64)
    allowed[out] = 0
    assert output.token_metrics["ratio/masked_fraction"].tolist() == (1 - allowed).tolist()
    for gradient, before in zip(masked[1:3], free[1:3], strict=True):
        assert (gradient[out] == 0).all()
        assert (before[out] != 0).any()
        torch.testing.assert_close(gradient, before * allowed)
    remaining = dataclasses.replace(inputs, token_weights=inputs.token_weights * allowed)
    torch.testing.assert_close(output.loss, MASKED_TERMS(policy_loss)(remaining).loss)


@every_loss
def test_sequence_mask_uses_geometric_means(policy_loss: Loss, inputs: LossInputs) -> None:
    """The means are 2, sqrt(16 * 16 / 16) = 4 and less than 1/2; only the first is in the range [0.5, 3]."""
    inputs = with_ratios(inputs, [8, 0.5, 2, 16, 16, 1 / 16, 16, 0.4, 0.4, 0.4, 0.4, 1], [3, 4, 5])
    output = MASKED_TERMS(policy_loss, sequence_mask=(0.5, 3.0))(inputs)
    free = value_and_gradients(MASKED_TERMS(policy_loss)(inputs).loss, inputs)
    masked = value_and_gradients(output.loss, inputs)
    assert output.token_metrics["ratio/masked_fraction"].tolist() == [0] * 3 + [1] * 9
    for gradient, before in zip(masked[1:3], free[1:3], strict=True):
        assert (gradient[3:] == 0).all()
        assert (before[3:] != 0).any()
        torch.testing.assert_close(gradient[:3], before[:3])


@every_loss
def test_either_mask_removes_a_token(policy_loss: Loss, inputs: LossInputs) -> None:
    inputs = with_ratios(inputs, [1, 9, 1, 5, 5, 5, 5, 1, 1, 1, 1, 1], [3, 4, 5])
    output = MASKED_TERMS(policy_loss, token_mask=(0.5, 8.0), sequence_mask=(0.5, 3.0))(inputs)
    assert output.token_metrics["ratio/masked_fraction"].tolist() == [0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]


@every_loss
def test_masks_do_not_change_the_value_loss(policy_loss: Loss, inputs: LossInputs) -> None:
    """An off-policy token is as informative about the reward as any other token."""
    options: dict[str, Any] = {"gae_lambda": 1.0, "value_coefficient": 0.7, "value_clip": 0.4}
    masked = Objective(policy_loss, token_mask=(0.9, 1.1), **options)(inputs)
    assert masked.token_metrics["ratio/masked_fraction"].any()
    values = present(inputs.values)
    (gradient,) = torch.autograd.grad(masked.loss, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(values_by_hand(inputs), values)[0])
    squared_error = (values - present(inputs.returns)).detach() ** 2
    torch.testing.assert_close(masked.token_metrics["value/squared_error"], squared_error)


# --- gradients and extremes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_gradient_matches_finite_differences(estimator: str, unbiased: bool, inputs: LossInputs) -> None:
    """Some ratios are truncated at 2. The weight of k2 is constant in the gradient, so k2 is compared by itself."""
    objective = Objective(reinforce, max_ratio=2.0, kl_coefficient=1.0, kl_estimator=estimator, kl_unbiased=unbiased)
    assert (inputs.ratio > 2).any()

    def kl(policy_logprobs: Tensor) -> Tensor:
        return objective.kl_reference(dataclasses.replace(inputs, policy_logprobs=policy_logprobs))

    if estimator == "k2" and unbiased:
        constant = inputs.ratio.detach().clamp(max=2.0)
        actual, expected = (
            torch.autograd.grad(total, inputs.policy_logprobs)[0]
            for total in (
                kl(inputs.policy_logprobs).sum(),
                (constant * k2(present(inputs.ref_logprobs) - inputs.policy_logprobs)).sum(),
            )
        )
        torch.testing.assert_close(actual, expected)
    else:
        assert torch.autograd.gradcheck(kl, inputs.policy_logprobs)


@every_loss
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("unbiased", [True, False])
def test_extreme_ratios_give_finite_loss_and_gradient(policy_loss: Loss, estimator: str, unbiased: bool) -> None:
    """The policies differ by all log ratios of +-10000, +-100 and 0, with advantages of both signs."""
    extremes = (-1e4, -100.0, 0.0, 100.0, 1e4)
    rows = list(itertools.product(extremes, extremes, extremes, (-3.0, 3.0)))
    behavior, reference, proximal, advantages = torch.tensor(rows).T.contiguous()
    policy = torch.zeros(len(rows)).requires_grad_()
    inputs = LossInputs(
        policy, behavior, advantages, torch.full_like(behavior, 1 / len(rows)), torch.arange(len(rows)) // 2,
        len(rows) // 2, ref_logprobs=reference, proximal_logprobs=proximal,
    )  # fmt: skip
    objective = Objective(
        policy_loss, token_mask=(1e-9, 1e9), kl_coefficient=0.1, kl_estimator=estimator, kl_unbiased=unbiased
    )
    for variant in (objective, Objective(policy_loss), dataclasses.replace(objective, token_mask=None)):
        output = variant(inputs)
        (gradient,) = torch.autograd.grad(output.loss, policy)
        assert output.loss.isfinite()
        assert gradient.isfinite().all()
        assert all(metric.isfinite().all() for metric in output.token_metrics.values())
