"""Draining batch: all sequences start together, short responses finish first, and the engine runs emptier and emptier.

The model is fluid: at the l-th token, h P(length >= l) of h sequences are still in flight, possibly a fraction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midflight.sim.costs import StepCost
from midflight.sim.lengths import LengthDistribution
from midflight.types import Float64Array


@dataclass(frozen=True, slots=True)
class Draining:
    """One engine and its share of a batch. Shapes: active [L] sequences at the l-th token, times [L] of that step."""

    active: Float64Array
    times: Float64Array

    @property
    def duration(self) -> float:
        return float(self.times.sum())


def drain(lengths: LengthDistribution, cost: StepCost, num_sequences: float) -> Draining:
    """Start `num_sequences` on an engine, add none. Raises: ScenarioError if they are beyond the table of rates."""
    active = num_sequences * lengths.survival
    held = active * np.arange(lengths.max)
    return Draining(active, cost.step_times(active) + cost.per_token * held)
