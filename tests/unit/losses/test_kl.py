"""KL estimators match the exact divergence in mean and in mean gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midflight.losses.inputs import LossInputs
from midflight.losses.kl import KL_ESTIMATORS, k1, k2, k3
from midflight.losses.objective import Objective
from midflight.losses.reinforce import reinforce

NUM_SAMPLES = 200_000
# Three very different distributions over five tokens. No pi/mu reaches the truncation at 5.
PI = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
REF = torch.tensor([0.05, 0.3, 0.05, 0.2, 0.4], dtype=torch.float64)
MU = torch.tensor([0.2, 0.1, 0.3, 0.15, 0.25], dtype=torch.float64)
KL_PI_REF = (PI * (PI / REF).log()).sum()


def inputs(logits: Tensor, token_ids: Tensor, behavior: Tensor) -> LossInputs:
    """Make loss inputs from tokens sampled from `behavior`."""
    logprobs = logits.log_softmax(0)[token_ids]
    ones = torch.ones(len(token_ids), dtype=torch.float64)
    return LossInputs(
        logprobs, behavior.log()[token_ids], ones, ones, torch.zeros(len(token_ids), dtype=torch.int64), 1,
        ref_logprobs=REF.log()[token_ids],
    )  # fmt: skip


def test_estimators_match_hand_computed_values() -> None:
    """The ratios q/p are 1, 2 and 1/2."""
    ratio = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    log2 = torch.tensor(2.0, dtype=torch.float64).log()
    for estimator, expected in (
        (k1, [0, -log2, log2]),
        (k2, [0, log2**2 / 2, log2**2 / 2]),
        (k3, [0, 1 - log2, log2 - 0.5]),
    ):
        torch.testing.assert_close(estimator(ratio.log()), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradients_match_finite_differences(name: str) -> None:
    log_ratio = torch.linspace(-4, 4, 16, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(KL_ESTIMATORS[name], log_ratio)
    assert torch.autograd.gradgradcheck(KL_ESTIMATORS[name], log_ratio)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_extreme_ratios_give_finite_estimates_and_gradients(name: str, log_ratio: float) -> None:
    leaf = torch.tensor([log_ratio], requires_grad=True)
    estimate = KL_ESTIMATORS[name](leaf)
    assert estimate.isfinite().all()
    assert torch.autograd.grad(estimate.sum(), leaf)[0].isfinite().all()


def standard_errors_off(samples: Tensor) -> float:
    return float((samples.mean() - KL_PI_REF).abs() / (samples.std() / NUM_SAMPLES**0.5))


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
@pytest.mark.parametrize("sampler", ["pi", "mu"])
def test_k1_and_k3_are_unbiased_and_k2_is_biased(name: str, unbiased: bool, sampler: str) -> None:
    """Samples come from pi, or from mu with importance weights."""
    behavior = {"pi": PI, "mu": MU}[sampler]
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.multinomial(behavior, NUM_SAMPLES, replacement=True, generator=generator)
    objective = Objective(reinforce, kl_coefficient=1.0, kl_estimator=name, kl_unbiased=sampler == "mu")
    off = standard_errors_off(objective.kl_reference(inputs(PI.log(), token_ids, behavior)))
    assert off < 4 if unbiased else off > 4


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_unweighted_samples_of_another_policy_are_biased(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.multinomial(MU, NUM_SAMPLES, replacement=True, generator=generator)
    objective = Objective(reinforce, kl_coefficient=1.0, kl_estimator=name, kl_unbiased=False)
    assert standard_errors_off(objective.kl_reference(inputs(PI.log(), token_ids, MU))) > 4


def mean_gradient(name: str, behavior: Tensor, unbiased: bool) -> Tensor:
    """Expected gradient of the estimator over `behavior`, with respect to pi's logits, by enumeration of all tokens."""
    logits = PI.log().requires_grad_()
    objective = Objective(reinforce, kl_coefficient=1.0, kl_estimator=name, kl_unbiased=unbiased)
    kl = objective.kl_reference(inputs(logits, torch.arange(len(PI)), behavior))
    return torch.autograd.grad((behavior * kl).sum(), logits)[0]


def exact_gradient(reverse: bool = False) -> Tensor:
    """Gradient of KL(pi || reference), or of KL(reference || pi) if `reverse`, with respect to pi's logits."""
    logits = PI.log().requires_grad_()
    pi = logits.softmax(0)
    kl = REF * (REF / pi).log() if reverse else pi * (pi / REF).log()
    return torch.autograd.grad(kl.sum(), logits)[0]


@pytest.mark.parametrize("behavior", [PI, MU], ids=["pi", "mu"])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_weighted_mean_gradient_equals_the_gradient_of_the_kl(name: str, behavior: Tensor) -> None:
    assert exact_gradient().abs().max() > 0.1
    torch.testing.assert_close(mean_gradient(name, behavior, unbiased=True), exact_gradient())


def test_unweighted_estimators_have_different_mean_gradients() -> None:
    """Mean gradients: zero for k1, the gradient of the KL for k2, the gradient of the reverse KL for k3."""
    zero = torch.zeros(len(PI), dtype=torch.float64)
    torch.testing.assert_close(mean_gradient("k1", PI, unbiased=False), zero)
    torch.testing.assert_close(mean_gradient("k2", PI, unbiased=False), exact_gradient())
    torch.testing.assert_close(mean_gradient("k3", PI, unbiased=False), exact_gradient(reverse=True))
    assert (exact_gradient(reverse=True) - exact_gradient()).abs().max() > 0.1
