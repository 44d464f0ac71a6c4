"""Learning rate of each optimizer step: a function of the step alone, so that a resumed run uses the same rates."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Linear warm-up over `num_warmup_steps`, then a decay to `final` at step `num_steps`, or a constant rate.

    Units: `peak` and `final` are learning rates; `num_warmup_steps` and `num_steps` are optimizer steps.
    """

    peak: float
    shape: str = "constant"  # "constant", "linear" or "cosine"
    num_warmup_steps: int = 0
    num_steps: int = 1
    final: float = 0.0

    def __call__(self, step: int) -> float:
        """Learning rate of the step that produces version `step` + 1."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / (self.num_warmup_steps + 1)
        if self.shape == "constant":
            return self.peak
        done = min(1.0, (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (self.peak - self.final) * left
