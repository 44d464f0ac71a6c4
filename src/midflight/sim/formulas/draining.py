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


def drain(lengths: LengthDistribution, cost: StepCost, num_sequences: float) -> Draining:
    """`num_sequences` started at once on an engine, none after them. Raises: ScenarioError past the cost's table."""
    active = num_sequences * lengths.survival
    held = active * np.arange(lengths.max)
    return Draining(active, cost.step_times(active) + cost.per_token * held)
