"""A batch that is generated as a whole: its short responses finish first, and the engine runs ever emptier.

Fluid: at its l-th token a batch of h sequences has h P(length >= l) of them, whole or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midflight.sim.costs import StepCost
from midflight.sim.lengths import LengthDistribution
from midflight.types import Float64Array


@dataclass(frozen=True, slots=True)
class Draining:
    """One engine and its share of a batch. Shapes: active, times [L], sequences at, and time of, the l-th token."""

    active: Float64Array
    times: Float64Array

    @property
    def duration(self) -> float:
        return float(self.times.sum())

    @property
    def rate(self) -> float:
        """Tokens per unit of time."""
        return float(self.active.sum()) / self.duration

    @property
    def share_until_half(self) -> float:
        """Of the time, before half of the sequences are done."""
        return 1 - self.share_below(float(self.active[0]) / 2)

    def share_below(self, num_active: float) -> float:
        """Of the time, with fewer than so many sequences going."""
        below = self.active < num_active * (1 - 1e-9)
        return float(self.times[below].sum()) / self.duration


def drain(lengths: LengthDistribution, cost: StepCost, num_sequences: float) -> Draining:
    """`num_sequences` started at once on an engine, none after them. Raises: ScenarioError past the cost's table."""
    active = num_sequences * lengths.survival
    held = active * np.arange(lengths.max)
    return Draining(active, cost.step_times(active) + cost.per_token * held)
