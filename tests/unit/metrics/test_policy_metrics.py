"""Policy metrics match hand-computed values, for every split of a batch into microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from midflight.metrics.jsonl import JsonlWriter, read_metrics
from midflight.metrics.policy import (
    Metrics,
    PolicyMetrics,
    PolicySums,
    effective_sample_size,
    kl_behavior,
    ratio_statistics,
)
from midflight.metrics.segments import LAG_EDGES, TokenOrigins
from narrowing import instance

NAMES = {
    *("ess", "ess_clamped", "ratio/mean", "ratio/max", "ratio/clamped_fraction"),
    *("kl/behavior", "kl/behavior_k1", "entropy"),
}
LOG_1_1_2 = torch.tensor([0.0, 0.0, math.log(2)], dtype=torch.float64)


def origins_of(lags: Sequence[int], positions: Sequence[int], of_one_version: Sequence[bool]) -> TokenOrigins:
    return TokenOrigins(
        np.array(lags, np.int32), np.array(positions, np.int64), np.array(of_one_version, np.bool_)
    )  # fmt: skip


def policy_metrics(policy: Tensor, behavior: Tensor, entropy: Tensor, max_ratio: float = 5.0) -> Metrics:
    """Metrics of a batch whose tokens all have lag 1 and stand in the first tenth of their responses."""
    batch, count = PolicyMetrics(max_ratio), len(policy)
    batch.add(origins_of([1] * count, [0] * count, [False] * count), policy, behavior, entropy)
    return batch.result()


def of_whole_batch(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not isinstance(value, list)}


def test_equal_weights_give_an_ess_of_one() -> None:
    assert effective_sample_size(torch.full((7,), -0.3)).item() == pytest.approx(1.0)


def test_ess_matches_hand_computed_value() -> None:
    """Weights 1, 1, 2: (1 + 1 + 2)^2 / (3 * (1 + 1 + 4)) = 16 / 18."""
    assert effective_sample_size(LOG_1_1_2).item() == pytest.approx(16 / 18)


def test_ess_truncates_weights_as_the_loss_does() -> None:
    """Weights 1 and 9 give 100 / (2 * 82); truncated at 5 they give 36 / (2 * 26)."""
    log_ratio = torch.tensor([1.0, 9.0], dtype=torch.float64).log()
    assert effective_sample_size(log_ratio).item() == pytest.approx(100 / 164)
    assert effective_sample_size(log_ratio, max_ratio=5.0).item() == pytest.approx(36 / 52)


def test_one_dominating_token_gives_an_ess_of_one_sample() -> None:
    log_ratio = torch.tensor([200.0] + [0.0] * 9)
    assert effective_sample_size(log_ratio).item() == pytest.approx(1 / 10)


def test_ratio_statistics_match_hand_computed_values() -> None:
    statistics = ratio_statistics(torch.tensor([1.0, 2.0, 5.0, 6.0], dtype=torch.float64).log(), max_ratio=5.5)
    assert [value.item() for value in statistics] == pytest.approx([3.5, 6.0, 0.25])


def test_kl_matches_hand_computed_value() -> None:
    """Ratios 1 and 2 give the mean of 0 and (2 - 1) - log 2."""
    assert kl_behavior(torch.tensor([1.0, 2.0]).double().log()).item() == pytest.approx((1 - math.log(2)) / 2)


def test_kl_is_from_behavior_to_policy() -> None:
    """With the exact frequencies of mu the estimate is KL(mu || pi), which differs from KL(pi || mu)."""
    mu, pi = torch.tensor([0.25, 0.75]).double(), torch.tensor([0.5, 0.5]).double()
    log_ratio = (pi / mu).log().repeat_interleave(torch.tensor([1, 3]))  # each token as often as mu draws it
    assert kl_behavior(log_ratio).item() == pytest.approx((mu * (mu / pi).log()).sum().item())


@pytest.mark.parametrize("measure", [effective_sample_size, kl_behavior, lambda ratio: ratio_statistics(ratio, 5.0)])
def test_no_tokens_are_an_error(measure: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        measure(torch.empty(0))


def test_batch_metrics_match_hand_computed_values() -> None:
    """The log ratios are 0, 0 and log 6; ratios are truncated at 5."""
    behavior = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    policy = behavior + torch.tensor([1.0, 1.0, 6.0], dtype=torch.float64).log()
    assert of_whole_batch(policy_metrics(policy, behavior, torch.tensor([0.1, 0.2, 0.6]))) == {
        "ess": pytest.approx(64 / (3 * 38)),
        "ess_clamped": pytest.approx(49 / (3 * 27)),
        "ratio/mean": pytest.approx(8 / 3),
        "ratio/max": pytest.approx(6.0),
        "ratio/clamped_fraction": pytest.approx(1 / 3),
        "kl/behavior": pytest.approx((5 - math.log(6)) / 3),
        "kl/behavior_k1": pytest.approx(-math.log(6) / 3),
        "entropy": pytest.approx(0.3),
    }


# (log ratio, lag, tenth, of one version)
TOKENS = [
    (math.log(2), 0, 0, True),
    (math.log(4), 0, 9, True),
    (math.log(8), 0, 9, False),  # an earlier token of this sequence has an older version
    (math.log(1), 2, 0, False),
    (math.log(3), 3, 4, False),
    (math.log(6), 100, 4, False),
]


def counted(tokens: Sequence[tuple[float, int, int, bool]], cuts: Sequence[int] = (), first: int = 0) -> PolicySums:
    """Count tokens in microbatches split at `cuts`; entropy and a token metric are `first`, `first` + 1, ..."""
    batch = PolicyMetrics(max_ratio=5.0)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut <= len(tokens))})
    numbers = torch.arange(first, first + len(tokens), dtype=torch.float64)
    for low, high in itertools.pairwise(edges):
        log_ratios, *origins = zip(*tokens[low:high], strict=True)
        part, policy = numbers[low:high], torch.tensor(log_ratios, dtype=torch.float64)
        batch.add(origins_of(*origins), policy, torch.zeros_like(policy), part, {"kl/reference": part})
    return batch.counted()


def measured(tokens: Sequence[tuple[float, int, int, bool]], cuts: Sequence[int] = ()) -> Metrics:
    return counted(tokens, cuts).result()


def nan_or(value: object) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True)


def test_metrics_by_lag_match_hand_computed_values() -> None:
    metrics, nan = measured(TOKENS), math.nan
    assert metrics["lag/tokens_by_lag"] == [3, 0, 2, 0, 0, 0, 0, 1]
    assert metrics["ratio/mean/by_lag"] == nan_or([14 / 3, nan, 2, nan, nan, nan, nan, 6])
    assert metrics["ratio/max/by_lag"] == nan_or([8, nan, 3, nan, nan, nan, nan, 6])
    assert metrics["ratio/clamped_fraction/by_lag"] == nan_or([1 / 3, nan, 0, nan, nan, nan, nan, 1])
    assert metrics["ess/by_lag"] == nan_or([196 / (3 * 84), nan, 16 / (2 * 10), nan, nan, nan, nan, 1])
    assert metrics["ess_clamped/by_lag"] == nan_or([121 / (3 * 45), nan, 16 / (2 * 10), nan, nan, nan, nan, 1])
    assert metrics["kl/behavior_k1/by_lag"] == nan_or(
        [-math.log(64) / 3, nan, -math.log(3) / 2, nan, nan, nan, nan, -math.log(6)]
    )
    assert metrics["kl/behavior/by_lag"] == nan_or(
        [(11 - math.log(64)) / 3, nan, (2 - math.log(3)) / 2, nan, nan, nan, nan, 5 - math.log(6)]
    )
    for name in ("entropy", "kl/reference"):
        assert metrics[f"{name}/by_lag"] == nan_or([1, nan, 3.5, nan, nan, nan, nan, 5])


def test_metrics_by_position_match_hand_computed_values() -> None:
    metrics, none = measured(TOKENS), [math.nan]
    assert metrics["ratio/max/by_position"] == nan_or([2, *none * 3, 6, *none * 4, 8])
    assert metrics["ratio/mean/by_position"] == nan_or([1.5, *none * 3, 4.5, *none * 4, 6])
    assert metrics["ess/by_position"] == nan_or([9 / 10, *none * 3, 81 / 90, *none * 4, 144 / 160])
    assert metrics["entropy/by_position"] == nan_or([1.5, *none * 3, 4.5, *none * 4, 1.5])


def test_all_metrics_but_mismatch_are_split_by_lag_and_position() -> None:
    metrics = measured(TOKENS)
    mismatch = {"mismatch/mean", "mismatch/max", "mismatch/kl", "mismatch/tokens"}
    assert of_whole_batch(metrics).keys() == NAMES | mismatch | {"kl/reference"}
    for name in NAMES | {"kl/reference"}:
        assert len(metrics.pop(f"{name}/by_lag")) == 8  # type: ignore[arg-type]
        assert len(metrics.pop(f"{name}/by_position")) == 10  # type: ignore[arg-type]
    assert {name for name, value in metrics.items() if isinstance(value, list)} == {"lag/tokens_by_lag"}


def test_mismatch_covers_tokens_of_one_version_only() -> None:
    """The log ratios are log 2 and log 4. In a sequence with an older token, newer tokens do not count."""
    metrics = measured(TOKENS)
    assert metrics["mismatch/mean"] == pytest.approx(math.log(8) / 2)
    assert metrics["mismatch/max"] == pytest.approx(math.log(4))
    assert metrics["mismatch/kl"] == pytest.approx((1 + 3 - math.log(8)) / 2)
    assert metrics["mismatch/tokens"] == 2
    assert not any(name.startswith("mismatch") for name in measured(TOKENS[2:]))


def test_mismatch_is_an_absolute_difference() -> None:
    metrics = measured([(-0.5, 0, 0, True), (0.25, 0, 0, True)])
    assert (metrics["mismatch/mean"], metrics["mismatch/max"]) == (0.375, 0.5)


tokens = st.lists(
    st.tuples(st.floats(-8, 8, width=32), st.integers(0, 200), st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=40,
)


@given(tokens, st.lists(st.integers(0, 40), max_size=6))
def test_split_into_microbatches_does_not_change_metrics(
    drawn: list[tuple[float, int, int, bool]], cuts: list[int]
) -> None:
    single, split = measured(drawn), measured(drawn, cuts)
    assert list(split) == list(single)
    for name, value in single.items():
        assert split[name] == nan_or(value), name


@given(tokens)
def test_segment_metrics_equal_metrics_of_its_tokens_alone(drawn: list[tuple[float, int, int, bool]]) -> None:
    metrics = measured(drawn)
    buckets = [next(bucket for bucket in reversed(range(8)) if token[1] >= LAG_EDGES[bucket]) for token in drawn]
    segments = {"": [[True] * len(drawn)]}
    segments["/by_lag"] = [[own == bucket for own in buckets] for bucket in range(8)]
    segments["/by_position"] = [[token[2] == position for token in drawn] for position in range(10)]
    for suffix, members in segments.items():
        for index, chosen in enumerate(members):

            def of(name: str, suffix: str = suffix, index: int = index) -> float:
                value = metrics[f"{name}{suffix}"]
                return value[index] if isinstance(value, list) else value

            log_ratio = torch.tensor([token[0] for token, own in zip(drawn, chosen, strict=True) if own]).double()
            if not len(log_ratio):
                assert all(math.isnan(of(name)) for name in NAMES)
                continue
            statistics = ratio_statistics(log_ratio, 5.0)
            assert of("ess") == nan_or(effective_sample_size(log_ratio).item())
            assert of("ess_clamped") == nan_or(effective_sample_size(log_ratio, 5.0).item())
            assert 0 < of("ess") <= 1 + 1e-12
            assert of("ratio/mean") == nan_or(statistics.mean.item())
            assert of("ratio/max") == statistics.max.item()
            assert of("ratio/clamped_fraction") == nan_or(statistics.clamped_fraction.item())
            assert of("kl/behavior") == nan_or(kl_behavior(log_ratio).item())
            assert of("kl/behavior_k1") == nan_or(-log_ratio.mean().item())


@given(tokens, st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_combined_ranks_measure_the_same_as_one_rank(
    drawn: list[tuple[float, int, int, bool]], cuts: list[int]
) -> None:
    """Some ranks have no tokens."""
    bounds = [0, *sorted(min(cut, len(drawn)) for cut in cuts), len(drawn)]
    ranks = [counted(drawn[start:stop], first=start) for start, stop in itertools.pairwise(bounds)]
    combined, single = PolicySums.of_all(ranks).result(), measured(drawn)
    assert list(combined) == list(single)
    for name, value in single.items():
        assert combined[name] == nan_or(value), name
    assert PolicySums.of_all([counted([]), counted([])]).result() == {}


def test_no_tokens_give_no_metrics() -> None:
    metrics = PolicyMetrics(max_ratio=5.0)
    assert metrics.result() == {}
    metrics.add(origins_of([], [], []), torch.empty(0), torch.empty(0), torch.empty(0))
    assert metrics.result() == {}


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_extreme_ratios_give_finite_metrics(log_ratio: float) -> None:
    behavior = torch.zeros(50)
    metrics = of_whole_batch(policy_metrics(behavior + log_ratio, behavior, torch.zeros(50)))
    assert set(metrics) == NAMES
    assert all(math.isfinite(value) for value in metrics.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("log_ratio", [0.0, math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_become_null_in_the_file(tmp_path: Path, log_ratio: float) -> None:
    with JsonlWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(measured([(log_ratio, 0, 0, True), (0.5, 2, 3, False)]))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["ess/by_lag"][1] is None
    assert line["ess/by_lag"][2] == pytest.approx(1), "a token that is not finite affects only its own segments"
    assert line["mismatch/tokens"] == 1
    assert (line["mismatch/max"] is None) == (not math.isfinite(log_ratio))


def test_sums_are_double_precision() -> None:
    """In float32, the ESS of a million ratios of 1 + 1e-4 would exceed this tolerance."""
    behavior = torch.zeros(1_000_000)
    policy = behavior + 1e-4
    policy[::2] = -1e-4
    metrics = of_whole_batch(policy_metrics(policy, behavior, behavior))
    assert 1 - instance(metrics["ess"], float) == pytest.approx(1e-8, rel=1e-3)
    assert metrics["kl/behavior"] == pytest.approx(5e-9, rel=1e-3)


def test_metrics_hold_no_graph() -> None:
    metrics = PolicyMetrics(max_ratio=5.0)
    policy = torch.zeros(3, requires_grad=True)
    metrics.add(origins_of([0] * 3, [0] * 3, [True] * 3), policy, torch.zeros(3), policy.exp())
    assert metrics.sums is not None
    assert not metrics.sums.requires_grad


def test_adding_copies_nothing_to_the_host() -> None:
    """Tensors on the meta device have no values, so a copy to the host would raise."""
    metrics, values = PolicyMetrics(max_ratio=5.0), torch.zeros(3, device="meta")
    for _ in range(2):
        metrics.add(origins_of([0, 1, 5], [0, 4, 9], [True] * 3), values, values, values, {"kl/reference": values})
    with pytest.raises(NotImplementedError, match="meta tensor"):
        metrics.result()
