"""ESS, ratios and KL by hand, and the same for every split of a batch into microbatches."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.metrics.policy import (
    PolicyMetrics,
    effective_sample_size,
    kl_behavior,
    policy_metrics,
    ratio_statistics,
)

NAMES = {"ess", "ess_clamped", "ratio/mean", "ratio/max", "ratio/clamped_fraction", "kl/behavior", "entropy"}
LOG_1_1_2 = torch.tensor([0.0, 0.0, math.log(2)], dtype=torch.float64)


def test_equal_weights_are_on_policy() -> None:
    assert effective_sample_size(torch.full((7,), -0.3)).item() == pytest.approx(1.0)


def test_effective_sample_size_by_hand() -> None:
    """Weights 1, 1, 2: (1 + 1 + 2)^2 / (3 * (1 + 1 + 4)) = 16 / 18."""
    assert effective_sample_size(LOG_1_1_2).item() == pytest.approx(16 / 18)


def test_effective_sample_size_counts_the_weights_that_the_loss_does_not_truncate() -> None:
    """Weights 1 and 9: 100 / (2 * 82); truncated at 5: 36 / (2 * 26)."""
    log_ratio = torch.tensor([1.0, 9.0], dtype=torch.float64).log()
    assert effective_sample_size(log_ratio).item() == pytest.approx(100 / 164)
    assert effective_sample_size(log_ratio, max_ratio=5.0).item() == pytest.approx(36 / 52)


def test_one_dominating_token_leaves_one_sample() -> None:
    log_ratio = torch.tensor([200.0] + [0.0] * 9)
    assert effective_sample_size(log_ratio).item() == pytest.approx(1 / 10)


def test_ratio_statistics_by_hand() -> None:
    statistics = ratio_statistics(torch.tensor([1.0, 2.0, 5.0, 6.0], dtype=torch.float64).log(), max_ratio=5.5)
    assert [value.item() for value in statistics] == pytest.approx([3.5, 6.0, 0.25])


def test_kl_by_hand() -> None:
    """Ratios 1 and 2: mean of 0 and (2 - 1) - log 2."""
    assert kl_behavior(torch.tensor([1.0, 2.0]).double().log()).item() == pytest.approx((1 - math.log(2)) / 2)


def test_kl_is_that_of_behavior_from_policy() -> None:
    """Over the exact distribution mu the estimate is KL(mu || pi), which differs from KL(pi || mu)."""
    mu, pi = torch.tensor([0.25, 0.75]).double(), torch.tensor([0.5, 0.5]).double()
    log_ratio = (pi / mu).log().repeat_interleave(torch.tensor([1, 3]))  # tokens as often as mu draws them
    assert kl_behavior(log_ratio).item() == pytest.approx((mu * (mu / pi).log()).sum().item())


@pytest.mark.parametrize("measure", [effective_sample_size, kl_behavior, lambda ratio: ratio_statistics(ratio, 5.0)])
def test_nothing_to_measure_is_an_error(measure) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        measure(torch.empty(0))


def test_the_batch_by_hand() -> None:
    """Log ratios 0, 0 and log 6, truncated at 5."""
    behavior = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    policy = behavior + torch.tensor([1.0, 1.0, 6.0], dtype=torch.float64).log()
    assert policy_metrics(policy, behavior, torch.tensor([0.1, 0.2, 0.6]), max_ratio=5.0) == {
        "ess": pytest.approx(64 / (3 * 38)),
        "ess_clamped": pytest.approx(49 / (3 * 27)),
        "ratio/mean": pytest.approx(8 / 3),
        "ratio/max": pytest.approx(6.0),
        "ratio/clamped_fraction": pytest.approx(1 / 3),
        "kl/behavior": pytest.approx((5 - math.log(6)) / 3),
        "entropy": pytest.approx(0.3),
    }


log_ratios = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40)


@given(log_ratios, st.lists(st.integers(0, 40), max_size=6))
def test_any_split_measures_the_same_as_the_whole_batch(values: list[float], cuts: list[int]) -> None:
    log_ratio = torch.tensor(values)
    behavior = torch.linspace(-4, 0, len(values))
    policy, entropy = behavior + log_ratio, torch.linspace(0, 2, len(values))
    exact = policy.double() - behavior.double()
    split = PolicyMetrics(max_ratio=5.0)
    edges = sorted({0, len(values), *(cut for cut in cuts if cut <= len(values))})
    for low, high in itertools.pairwise(edges):
        split.add(policy[low:high], behavior[low:high], entropy[low:high])
    statistics = ratio_statistics(exact, 5.0)
    assert split.result() == {
        "ess": pytest.approx(effective_sample_size(exact).item(), rel=1e-9),
        "ess_clamped": pytest.approx(effective_sample_size(exact, 5.0).item(), rel=1e-9),
        "ratio/mean": pytest.approx(statistics.mean.item(), rel=1e-9),
        "ratio/max": statistics.max.item(),
        "ratio/clamped_fraction": pytest.approx(statistics.clamped_fraction.item()),
        "kl/behavior": pytest.approx(kl_behavior(exact).item(), rel=1e-9, abs=1e-12),
        "entropy": pytest.approx(entropy.double().mean().item()),
    }
    assert 0 < split.result()["ess"] <= 1 + 1e-12


def test_nothing_added_is_no_metric_rather_than_nan() -> None:
    metrics = PolicyMetrics(max_ratio=5.0)
    assert metrics.result() == {}
    metrics.add(torch.empty(0), torch.empty(0), torch.empty(0))
    assert metrics.result() == {}


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_absurd_ratios_stay_finite(log_ratio: float) -> None:
    behavior = torch.zeros(50)
    metrics = policy_metrics(behavior + log_ratio, behavior, torch.zeros(50), max_ratio=5.0)
    assert set(metrics) == NAMES
    assert all(math.isfinite(value) for value in metrics.values())
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_sums_are_double_precision() -> None:
    """In float32 a million ratios of 1 + 1e-4 would show an ESS off by more than this."""
    behavior = torch.zeros(1_000_000)
    policy = behavior + 1e-4
    policy[::2] = -1e-4
    metrics = policy_metrics(policy, behavior, behavior, max_ratio=5.0)
    assert 1 - metrics["ess"] == pytest.approx(1e-8, rel=1e-3)
    assert metrics["kl/behavior"] == pytest.approx(5e-9, rel=1e-3)


def test_gradients_are_not_kept_alive() -> None:
    metrics = PolicyMetrics(max_ratio=5.0)
    policy = torch.zeros(3, requires_grad=True)
    metrics.add(policy, torch.zeros(3), policy.exp())
    assert metrics.sums is not None
    assert not metrics.sums.requires_grad
