"""LossInputs in float64 from what a test cares about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from midflight.losses.inputs import LossInputs


@pytest.fixture
def inputs_of() -> Callable[..., LossInputs]:
    """Sequences of these lengths, one of all tokens if none are given; every token weighs 1 / tokens."""

    def make(
        policy: Tensor, behavior: Tensor, advantages: Tensor, lengths: Sequence[int] | None = None, **others: Any
    ) -> LossInputs:
        sizes = torch.tensor(lengths or [len(policy)])
        weights = torch.full_like(behavior, 1 / len(behavior))
        return LossInputs(
            policy, behavior, advantages, **{
                "token_weights": weights,
                "sequence_index": torch.arange(len(sizes)).repeat_interleave(sizes),
                "num_sequences": len(sizes),
                **others,
            },
        )  # fmt: skip

    return make
