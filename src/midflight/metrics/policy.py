"""How far the policy in training has moved from the one that sampled, over the tokens that carry loss.

Legend: M sampled tokens of one microbatch or of a whole batch; everything is computed in float64.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from midflight.metrics.kl import k3

# The square of exp(300), summed over any batch, still fits a float64; so does its inverse.
LOG_RATIO_LIMIT = 300.0


def importance_ratio(log_ratio_M: Tensor) -> Tensor:
    """pi/mu per token in float64, log ratios beyond +-300 nats counting as 300.

    Shapes: log_ratio_M [M] = log pi - log mu -> [M].
    """
    return log_ratio_M.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def effective_sample_size(log_ratio_M: Tensor, max_ratio: float | None = None) -> Tensor:
    """Normalized ESS of importance weights, (sum w)^2 / (N * sum w^2), in (0, 1]; 1 means on-policy.

    With `max_ratio` the weights are truncated first, as the loss truncates them.

    Shapes: log_ratio_M [M] = log pi - log mu -> [].
    Raises: ValueError if there is no token.
    Source: PipelineRL, eq. 6 (Kong 1992).
    """
    _require_tokens(log_ratio_M)
    ratio_M = importance_ratio(log_ratio_M)
    if max_ratio is not None:
        ratio_M = ratio_M.clamp(max=max_ratio)
    return _normalized_ess(ratio_M.sum(), ratio_M.square().sum(), len(ratio_M))


class RatioStatistics(NamedTuple):
    """Of the importance ratios pi/mu, before truncation; each `[]`."""

    mean: Tensor
    max: Tensor
    clamped_fraction: Tensor  # share of the tokens whose ratio is over the limit


def ratio_statistics(log_ratio_M: Tensor, max_ratio: float) -> RatioStatistics:
    """Mean and maximum of pi/mu, and the share of tokens where it exceeds `max_ratio`.

    Shapes: log_ratio_M [M] = log pi - log mu -> three times [].
    Raises: ValueError if there is no token.
    """
    _require_tokens(log_ratio_M)
    ratio_M = importance_ratio(log_ratio_M)
    return RatioStatistics(ratio_M.mean(), ratio_M.max(), (ratio_M > max_ratio).double().mean())


def kl_behavior(log_ratio_M: Tensor) -> Tensor:
    """KL(mu || pi) by the k3 estimator, mean of (pi/mu - 1) - log(pi/mu) over tokens drawn from mu.

    Unbiased like k1 = -log(pi/mu), but never negative and of lower variance while pi and mu are close.

    Shapes: log_ratio_M [M] = log pi - log mu -> [].
    Units: nats per token.
    Raises: ValueError if there is no token.
    Source: Schulman, "Approximating KL divergence" (2020).
    Not: KL(pi || mu), nor the KL to a frozen reference.
    """
    _require_tokens(log_ratio_M)
    return k3(log_ratio_M.double()).mean()


@dataclass(slots=True)
class PolicyMetrics:
    """Policy metrics of one batch that arrives as microbatches; the split does not change the result.

    Nothing is copied to the host before `result`, so adding a microbatch does not wait for the accelerator.
    """

    max_ratio: float  # c: where the loss truncates importance ratios
    num_tokens: int = 0
    sums: Tensor | None = field(default=None, repr=False)  # in the order `add` stacks them
    largest_ratio: Tensor | None = field(default=None, repr=False)
    token_metrics: dict[str, Tensor | float] = field(default_factory=dict, repr=False)  # sums

    def add(
        self,
        policy_logprobs_M: Tensor,
        behavior_logprobs_M: Tensor,
        entropy_M: Tensor,
        token_metrics: Mapping[str, Tensor] = types.MappingProxyType({}),
    ) -> None:
        """Count the tokens of one microbatch; an empty one counts nothing. Of `token_metrics`, means are taken.

        Shapes: all [M], of the tokens that carry loss only.
        """
        if not policy_logprobs_M.numel():
            return
        log_ratio_M = policy_logprobs_M.detach().double() - behavior_logprobs_M.double()
        ratio_M = importance_ratio(log_ratio_M)
        clamped_M = ratio_M.clamp(max=self.max_ratio)
        sums = torch.stack(
            [
                ratio_M,
                ratio_M.square(),
                clamped_M,
                clamped_M.square(),
                (ratio_M > self.max_ratio).double(),
                k3(log_ratio_M),
                entropy_M.detach().double(),
            ]
        ).sum(dim=1)
        for name, values_M in token_metrics.items():
            self.token_metrics[name] = self.token_metrics.get(name, 0.0) + values_M.double().sum()
        largest = ratio_M.max()
        self.num_tokens += len(ratio_M)
        self.sums = sums if self.sums is None else self.sums + sums
        self.largest_ratio = largest if self.largest_ratio is None else torch.maximum(self.largest_ratio, largest)

    def result(self) -> dict[str, float]:
        """The metrics by name; nothing at all if no token was added."""
        if self.sums is None or self.largest_ratio is None:
            return {}
        num_tokens = self.num_tokens
        ratio, ratio_squared, clamped, clamped_squared, num_clamped, kl, entropy = self.sums.unbind()
        metrics = {
            "ess": _normalized_ess(ratio, ratio_squared, num_tokens),
            "ess_clamped": _normalized_ess(clamped, clamped_squared, num_tokens),
            "ratio/mean": ratio / num_tokens,
            "ratio/max": self.largest_ratio,
            "ratio/clamped_fraction": num_clamped / num_tokens,
            "kl/behavior": kl / num_tokens,
            "entropy": entropy / num_tokens,
            **{name: torch.as_tensor(total / num_tokens) for name, total in self.token_metrics.items()},
        }
        return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def policy_metrics(
    policy_logprobs_M: Tensor, behavior_logprobs_M: Tensor, entropy_M: Tensor, max_ratio: float
) -> dict[str, float]:
    """The metrics of a batch that is at hand as a whole; see `PolicyMetrics`."""
    batch = PolicyMetrics(max_ratio)
    batch.add(policy_logprobs_M, behavior_logprobs_M, entropy_M)
    return batch.result()


def _normalized_ess(sum_of_weights: Tensor, sum_of_squares: Tensor, num_tokens: int) -> Tensor:
    return sum_of_weights.square() / (num_tokens * sum_of_squares)


def _require_tokens(log_ratio_M: Tensor) -> None:
    if not log_ratio_M.numel():
        raise ValueError("no tokens to measure")
