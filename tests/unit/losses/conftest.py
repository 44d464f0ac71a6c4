"""Factory of LossInputs from the tensors that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from midflight.losses.inputs import LossInputs


@pytest.fixture
def inputs_of() -> Callable[..., LossInputs]:
    """Make inputs with sequences of `lengths`, by default one sequence; every token weighs 1 / tokens."""

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
