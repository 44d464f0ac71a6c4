"""The estimators of a KL divergence against the divergence itself, in mean and in mean gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midflight.losses.inputs import LossInputs
from midflight.losses.kl import KL_ESTIMATORS, k1, k2, k3
from midflight.losses.objective import Objective
from midflight.losses.reinforce import reinforce

NUM_SAMPLES = 200_000
# Three distributions over five tokens, far apart; no pi/mu is above 5, where it would be truncated.
PI = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
REF = torch.tensor([0.05, 0.3, 0.05, 0.2, 0.4], dtype=torch.float64)
MU = torch.tensor([0.2, 0.1, 0.3, 0.15, 0.25], dtype=torch.float64)
KL_PI_REF = (PI * (PI / REF).log()).sum()


def inputs(logits: Tensor, token_ids: Tensor, behavior: Tensor) -> LossInputs:
    """Of sampled tokens; `behavior` is the distribution they are from."""
    logprobs = logits.log_softmax(0)[token_ids]
    ones = torch.ones(len(token_ids), dtype=torch.float64)
    return LossInputs(
        logprobs, behavior.log()[token_ids], ones, ones, torch.zeros(len(token_ids), dtype=torch.int64), 1,
        ref_logprobs=REF.log()[token_ids],
    )  # fmt: skip


def test_by_hand() -> None:
    """q/p of 1, 2 and 1/2."""
    ratio = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    log2 = torch.tensor(2.0, dtype=torch.float64).log()
    for estimator, expected in (
        (k1, [0, -log2, log2]),
        (k2, [0, log2**2 / 2, log2**2 / 2]),
        (k3, [0, 1 - log2, log2 - 0.5]),
    ):
        torch.testing.assert_close(estimator(ratio.log()), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    log_ratio = torch.linspace(-4, 4, 16, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(KL_ESTIMATORS[name], log_ratio)
    assert torch.autograd.gradgradcheck(KL_ESTIMATORS[name], log_ratio)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_absurd_ratios_stay_finite(name: str, log_ratio: float) -> None:
    leaf = torch.tensor([log_ratio], requires_grad=True)
    estimate = KL_ESTIMATORS[name](leaf)
    assert estimate.isfinite().all()
    assert torch.autograd.grad(estimate.sum(), leaf)[0].isfinite().all()


def standard_errors_off(samples: Tensor) -> float:
    return float((samples.mean() - KL_PI_REF).abs() / (samples.std() / NUM_SAMPLES**0.5))


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
@pytest.mark.parametrize("sampler", ["pi", "mu"])
def test_two_of_three_estimators_have_the_kl_as_their_mean(name: str, unbiased: bool, sampler: str) -> None:
    """From tokens of pi, and with importance weights from tokens of mu."""
    behavior = {"pi": PI, "mu": MU}[sampler]
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.multinomial(behavior, NUM_SAMPLES, replacement=True, generator=generator)
    objective = Objective(reinforce, kl_coefficient=1.0, kl_estimator=name, kl_unbiased=sampler == "mu")
    off = standard_errors_off(objective.kl_reference(inputs(PI.log(), token_ids, behavior)))
    assert off < 4 if unbiased else off > 4


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_without_weights_tokens_of_another_policy_mislead(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.multinomial(MU, NUM_SAMPLES, replacement=True, generator=generator)
    objective = Objective(reinforce, kl_coefficient=1.0, kl_estimator=name, kl_unbiased=False)
    assert standard_errors_off(objective.kl_reference(inputs(PI.log(), token_ids, MU))) > 4


def mean_gradient(name: str, behavior: Tensor, unbiased: bool) -> Tensor:
    """Of the estimator over tokens of `behavior`, every token enumerated, with respect to pi's logits."""
    logits = PI.log().requires_grad_()
    objective = Objective(reinforce, kl_coefficient=1.0, kl_estimator=name, kl_unbiased=unbiased)
    kl = objective.kl_reference(inputs(logits, torch.arange(len(PI)), behavior))
    return torch.autograd.grad((behavior * kl).sum(), logits)[0]


def exact_gradient(of_ref_and_pi: bool = False) -> Tensor:
    """Of KL(pi || reference), or of KL(reference || pi)."""
    logits = PI.log().requires_grad_()
    pi = logits.softmax(0)
    kl = REF * (REF / pi).log() if of_ref_and_pi else pi * (pi / REF).log()
    return torch.autograd.grad(kl.sum(), logits)[0]


@pytest.mark.parametrize("behavior", [PI, MU], ids=["pi", "mu"])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_weighed_by_ratios_the_mean_gradient_is_that_of_the_kl(name: str, behavior: Tensor) -> None:
    assert exact_gradient().abs().max() > 0.1
    torch.testing.assert_close(mean_gradient(name, behavior, unbiased=True), exact_gradient())


def test_without_weights_each_estimator_has_its_own_mean_gradient() -> None:
    """k1 none at all, k2 the KL's, k3 that of the KL the other way round."""
    nothing = torch.zeros(len(PI), dtype=torch.float64)
    torch.testing.assert_close(mean_gradient("k1", PI, unbiased=False), nothing)
    torch.testing.assert_close(mean_gradient("k2", PI, unbiased=False), exact_gradient())
    torch.testing.assert_close(mean_gradient("k3", PI, unbiased=False), exact_gradient(of_ref_and_pi=True))
    assert (exact_gradient(of_ref_and_pi=True) - exact_gradient()).abs().max() > 0.1
