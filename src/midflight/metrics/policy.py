"""Distance between the policy in training and the behavior policy, over the tokens that carry loss.

Legend: M sampled tokens of one microbatch or of a whole batch; everything is computed in float64.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from midflight.losses.inputs import importance_ratio
from midflight.losses.kl import k1, k3
from midflight.metrics.segments import LAG_EDGES, NUM_POSITIONS, TokenOrigins, lag_buckets
from midflight.types import Float64Array, Int64Array


def effective_sample_size(log_ratio_M: Tensor, max_ratio: float | None = None) -> Tensor:
    """Normalized ESS of importance weights, (sum w)^2 / (N * sum w^2), in (0, 1]; 1 means on-policy.

    With `max_ratio` the weights are truncated first, as the loss truncates them.

    Shapes: log_ratio_M [M] = log pi - log mu -> [].
    Raises: ValueError if there are no tokens.
    Source: PipelineRL, eq. 6 (Kong 1992).
    """
    _require_tokens(log_ratio_M)
    ratio_M = importance_ratio(log_ratio_M.double())
    if max_ratio is not None:
        ratio_M = ratio_M.clamp(max=max_ratio)
    return _normalized_ess(ratio_M.sum(), ratio_M.square().sum(), len(ratio_M))


class RatioStatistics(NamedTuple):
    """Statistics of the importance ratios pi/mu before truncation; each `[]`."""

    mean: Tensor
    max: Tensor
    clamped_fraction: Tensor  # share of the tokens whose ratio exceeds the limit


def ratio_statistics(log_ratio_M: Tensor, max_ratio: float) -> RatioStatistics:
    """Mean and maximum of pi/mu, and the share of tokens where it exceeds `max_ratio`.

    Shapes: log_ratio_M [M] = log pi - log mu -> three times [].
    Raises: ValueError if there are no tokens.
    """
    _require_tokens(log_ratio_M)
    ratio_M = importance_ratio(log_ratio_M.double())
    return RatioStatistics(ratio_M.mean(), ratio_M.max(), (ratio_M > max_ratio).double().mean())


def kl_behavior(log_ratio_M: Tensor) -> Tensor:
    """KL(mu || pi) by the k3 estimator, mean of (pi/mu - 1) - log(pi/mu) over tokens drawn from mu.

    Unbiased like k1 = -log(pi/mu), but never negative and of lower variance while pi and mu are close.

    Shapes: log_ratio_M [M] = log pi - log mu -> [].
    Units: nats per token.
    Raises: ValueError if there are no tokens.
    Source: Schulman, "Approximating KL divergence" (2020).
    Not: KL(pi || mu), nor the KL to a frozen reference.
    """
    _require_tokens(log_ratio_M)
    return k3(log_ratio_M.double()).mean()


Metrics = dict[str, float | list[float]]
Sums = TypeVar("Sums", Tensor, Float64Array)

# Every combination of (of one version or not, bucket of lags, tenth of the response). Each token is in one cell.
_CELLS = (2, len(LAG_EDGES), NUM_POSITIONS)
_ONLY_SUMMED = ("ratio", "ratio squared", "clamped ratio", "clamped ratio squared", "distance")


@dataclass(slots=True)
class PolicyMetrics:
    """Policy metrics of one batch that arrives as microbatches; the split does not change the result.

    Sums and maxima are stored for every cell of `_CELLS`; every reported metric is computed from cells. Nothing is
    copied to the host before `counted`, so adding a microbatch does not wait for the accelerator.

    Legend: Q quantities, C cells.
    """

    max_ratio: float  # c: where the loss truncates importance ratios
    num_tokens: Int64Array = field(default_factory=lambda: np.zeros(math.prod(_CELLS), np.int64), repr=False)  # [C]
    names: tuple[str, ...] = ()  # of the Q quantities
    sums: Tensor | None = field(default=None, repr=False)  # [Q, C]
    largest: Tensor | None = field(default=None, repr=False)  # [2, C]: pi/mu, |log pi/mu|

    def add(
        self,
        origins: TokenOrigins,
        policy_logprobs_M: Tensor,
        behavior_logprobs_M: Tensor,
        entropy_M: Tensor,
        token_metrics: Mapping[str, Tensor] = types.MappingProxyType({}),
    ) -> None:
        """Count the tokens of one microbatch, which may be empty. `token_metrics` are reported as means.

        Shapes: all [M], only for tokens that carry loss.
        """
        if not policy_logprobs_M.numel():
            return
        log_ratio_M = policy_logprobs_M.detach().double() - behavior_logprobs_M.double()
        ratio_M = importance_ratio(log_ratio_M)
        clamped_M = ratio_M.clamp(max=self.max_ratio)
        quantities = {
            "ratio": ratio_M,
            "ratio squared": ratio_M.square(),
            "clamped ratio": clamped_M,
            "clamped ratio squared": clamped_M.square(),
            "ratio/clamped_fraction": (ratio_M > self.max_ratio).double(),
            "kl/behavior": k3(log_ratio_M),
            "kl/behavior_k1": k1(log_ratio_M),
            "distance": log_ratio_M.abs(),
            "entropy": entropy_M.detach().double(),
            **{name: values_M.detach().double() for name, values_M in token_metrics.items()},
        }
        assert self.names in ((), tuple(quantities)), "all microbatches of a batch need the same metrics"
        self.names = tuple(quantities)
        cells_M = _cells(origins)
        self._count(cells_M, torch.stack(list(quantities.values())), torch.stack([ratio_M, quantities["distance"]]))

    def _count(self, cells_M: Int64Array, values_QM: Tensor, extremes_M: Tensor) -> None:
        num_cells = len(self.num_tokens)
        self.num_tokens += np.bincount(cells_M, minlength=num_cells)
        # A blocking copy would wait for the accelerator's queued work.
        index_M = torch.from_numpy(cells_M).to(values_QM.device, non_blocking=True)
        if self.sums is None or self.largest is None:
            self.sums = values_QM.new_zeros(len(values_QM), num_cells)
            self.largest = values_QM.new_full((2, num_cells), -math.inf)
        self.sums.index_add_(1, index_M, values_QM)
        self.largest.scatter_reduce_(1, index_M.expand(2, -1), extremes_M, "amax")

    def counted(self) -> PolicySums:
        """Copy the counts so far to the host."""
        if self.sums is None or self.largest is None:
            return PolicySums(self.num_tokens, (), np.zeros((0, len(self.num_tokens))))
        return PolicySums(self.num_tokens, self.names, torch.cat([self.sums, self.largest]).cpu().numpy())

    def result(self) -> Metrics:
        """Return the metrics by name; {} if no token was added."""
        return self.counted().result()


@dataclass(frozen=True, slots=True)
class PolicySums:
    """Counts of PolicyMetrics, over all microbatches of one rank or of all ranks."""

    num_tokens: Int64Array  # [C]
    names: tuple[str, ...]  # of the Q quantities; empty if there are no tokens
    tables: Float64Array  # [Q + 2, C]: sums, then the largest pi/mu and the largest |log pi/mu|

    @classmethod
    def of_all(cls, ranks: Sequence[PolicySums]) -> PolicySums:
        """Combine the counts of all ranks."""
        counted = [rank for rank in ranks if rank.names] or ranks[:1]
        assert len({rank.names for rank in counted}) == 1, "all ranks need the same metrics"
        if not counted[0].names:
            return counted[0]
        tables = np.stack([rank.tables for rank in counted])
        total = np.concatenate([tables[:, :-2].sum(axis=0), tables[:, -2:].max(axis=0)])
        return cls(np.sum([rank.num_tokens for rank in counted], axis=0), counted[0].names, total)

    def result(self) -> Metrics:
        """Return the metrics by name; {} if no token was counted.

        Each metric is reported as `name` for the whole batch, as `name/by_lag` and as `name/by_position`; NaN marks a
        part without tokens. `mismatch/*` covers tokens of one version only, and is absent if there are none.
        """
        if not self.names:
            return {}
        tables = self.tables.reshape(-1, *_CELLS)
        sums, (ratios, distances) = dict(zip(self.names, tables[:-2], strict=True)), tables[-2:]
        num_tokens = self.num_tokens.reshape(_CELLS)
        result: Metrics = {"lag/tokens_by_lag": num_tokens.sum(axis=(0, 2)).tolist()}
        for name, (total, *parts) in _by_segment(sums, ratios, num_tokens).items():
            result[name] = total
            result[f"{name}/by_lag"], result[f"{name}/by_position"] = parts[: len(LAG_EDGES)], parts[len(LAG_EDGES) :]
        return {**result, **_mismatch(sums, distances, num_tokens)}


def _by_segment(
    sums: Mapping[str, Float64Array], largest_ratio: Float64Array, num_tokens: Int64Array
) -> dict[str, list[float]]:
    """Compute every metric for the whole batch, for each bucket of lags and for each tenth.

    Shapes: all `_CELLS` -> [19] each.
    """
    counts = _segments(num_tokens.astype(np.float64), np.add)
    totals = {name: _segments(table, np.add) for name, table in sums.items()}
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN, the value for a part without tokens
        metrics = {
            "ess": _normalized_ess(totals["ratio"], totals["ratio squared"], counts),
            "ess_clamped": _normalized_ess(totals["clamped ratio"], totals["clamped ratio squared"], counts),
            "ratio/mean": totals["ratio"] / counts,
            "ratio/max": np.where(counts, _segments(largest_ratio, np.maximum), np.nan),
            **{name: total / counts for name, total in totals.items() if name not in _ONLY_SUMMED},
        }
    return {name: values.tolist() for name, values in metrics.items()}


def _segments(cells: Float64Array, reduce: np.ufunc) -> Float64Array:
    """Reduce cells to the whole batch, the buckets of lags and the tenths. Shapes: `_CELLS` -> [19]."""
    by_both = reduce.reduce(cells, axis=0)
    by_lag, by_position = reduce.reduce(by_both, axis=1), reduce.reduce(by_both, axis=0)
    return np.concatenate([[reduce.reduce(by_lag)], by_lag, by_position])


def _mismatch(
    sums: Mapping[str, Float64Array], largest_distance: Float64Array, num_tokens: Int64Array
) -> dict[str, float]:
    """Differences between trainer and engine log-probabilities on tokens of one version; {} without such tokens."""
    count = int(num_tokens[1].sum())
    if not count:
        return {}
    return {
        "mismatch/mean": float(sums["distance"][1].sum()) / count,
        "mismatch/max": float(largest_distance[1].max()),
        "mismatch/kl": float(sums["kl/behavior"][1].sum()) / count,
        "mismatch/tokens": float(count),
    }


def _cells(origins: TokenOrigins) -> Int64Array:
    index = (origins.of_one_version.astype(np.int64), lag_buckets(origins.lags), origins.positions)
    return np.ravel_multi_index(index, _CELLS)


def _normalized_ess(sum_of_weights: Sums, sum_of_squares: Sums, num_tokens: Sums | int) -> Sums:
    return sum_of_weights**2 / (num_tokens * sum_of_squares)


def _require_tokens(log_ratio_M: Tensor) -> None:
    if not log_ratio_M.numel():
        raise ValueError("no tokens to measure")
