"""The policy in training: a model from a directory, computed as the recipe says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from midflight.models.loading import load_model, weights_of
from midflight.models.policy import PackedPolicy


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What is computed in a forward pass besides log-probabilities."""

    temperature: float = 1.0  # of the sampling distribution
    with_values: bool = False
    entropy_gradient: bool = False


PLAIN_POLICY = PolicySettings()


def build_policy(path: Path, settings: PolicySettings) -> PackedPolicy:
    """Raises: ModelError if the model cannot be loaded."""
    return PackedPolicy(load_model(path), settings.temperature, settings.with_values, settings.entropy_gradient)


def published_weights(policy: PackedPolicy) -> Iterator[tuple[str, Tensor]]:
    """What engines sample with, under the names they know; always in the same order."""
    yield from weights_of(policy.model).items()
