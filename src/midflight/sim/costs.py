"""What one decode step of an engine takes: t(h), or t(h, c) if attention over long contexts counts.

h sequences in flight, which hold c response tokens between them, get one token each. Times are in the unit of the
scenario (see the package), rates in tokens per unit, both of one engine. Fluid models ask for h that are no integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from midflight.errors import ScenarioError
from midflight.types import Float64Array

_ROUNDING = 1e-9  # 192.00000000000003 sequences are 192, and padded to no more

Counts = npt.ArrayLike  # of sequences or tokens, not necessarily whole


class StepCost(Protocol):
    """t(h, c) = t(h) + per_token * c, and t(0) = 0."""

    @property
    def per_token(self) -> float:
        """What a step takes longer for each response token that is held."""
        ...

    @property
    def max_in_flight(self) -> float:
        """The largest h that it is known for; infinite if for all."""
        ...

    def step_times(self, num_in_flight: Counts) -> Float64Array:
        """t(h), elementwise. Raises: ScenarioError past `max_in_flight`."""
        ...


@dataclass(frozen=True, slots=True)
class RateTable:
    """t(h) = h' / U(h'), from a table of U; h' is h padded to a multiple of `pad_to`.

    Between two sizes t is interpolated linearly. Below the first it is that of the first, as engines pad and a step
    costs something with a single sequence. Past the last, "hold" goes on with its U, and "error" refuses.

    Raises: ScenarioError naming `sizes` or `rates`, unless sizes go up, no larger one has a lower rate, and none a
        shorter step.
    """

    sizes: tuple[int, ...]  # sequences in flight
    rates: tuple[float, ...]  # U, tokens per unit of time
    pad_to: int = 1
    beyond: Literal["error", "hold"] = "error"
    per_token: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        _check_table(self.sizes, self.rates)

    @property
    def max_in_flight(self) -> float:
        return math.inf if self.beyond == "hold" else self.sizes[-1]

    def step_times(self, num_in_flight: Counts) -> Float64Array:
        asked = np.asarray(num_in_flight, np.float64)
        if asked.size and asked.max() > self.max_in_flight + _ROUNDING:
            raise ScenarioError(
                f"num_in_flight = {asked.max():g} is beyond the table, whose sizes end at {self.sizes[-1]};"
                f" fewer would work, a longer table, or beyond = 'hold'"
            )
        padded = self.pad_to * np.ceil(asked / self.pad_to - _ROUNDING) if self.pad_to > 1 else asked
        sizes = np.array(self.sizes, np.float64)
        rates = np.array(self.rates, np.float64)
        times = np.interp(padded, sizes, sizes / rates)
        times = np.where(padded > sizes[-1], padded / rates[-1], times)
        return np.where(asked > 0, times, 0.0)


@dataclass(frozen=True, slots=True)
class AffineCost:
    """t(h, c) = base + per_sequence * h + per_token * c. Raises: ScenarioError if a step would take no time."""

    base: float
    per_sequence: float = 0.0
    per_token: float = 0.0
    max_in_flight: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        if self.base + self.per_sequence <= 0:
            raise ScenarioError("base and per_sequence are both 0: a decode step would take no time")

    def step_times(self, num_in_flight: Counts) -> Float64Array:
        asked = np.asarray(num_in_flight, np.float64)
        return np.where(asked > 0, self.base + self.per_sequence * asked, 0.0)


def rates(cost: StepCost, num_in_flight: Counts) -> Float64Array:
    """U(h) = h / t(h), of sequences that hold no tokens yet; 0 at h = 0."""
    asked = np.asarray(num_in_flight, np.float64)
    times = cost.step_times(asked)
    return np.divide(asked, times, out=np.zeros_like(asked), where=times > 0)


def _check_table(sizes: Sequence[int], rates: Sequence[float]) -> None:
    if not sizes:
        raise ScenarioError("sizes: the table is empty")
    if len(sizes) != len(rates):
        raise ScenarioError(f"rates: there are {len(rates)} for {len(sizes)} sizes")
    if sizes[0] < 1:
        raise ScenarioError(f"sizes: should be at least 1, got {sizes[0]}")
    if any(not 0 < rate < math.inf for rate in rates):
        raise ScenarioError(f"rates: should be greater than 0 and finite, got {list(rates)}")
    for (size, rate), (larger, its_rate) in itertools.pairwise(zip(sizes, rates, strict=True)):
        if larger <= size:
            raise ScenarioError(f"sizes: should go up, and {larger} comes after {size}")
        if its_rate < rate:
            raise ScenarioError(
                f"rates: should not go down, and {larger} sequences have {its_rate:g}, {size} have {rate:g}"
            )
        if larger / its_rate < size / rate * (1 - 1e-3):
            raise ScenarioError(
                f"rates: a step of {larger} sequences would be shorter ({larger / its_rate:g}) than one of {size}"
                f" ({size / rate:g})"
            )


# Reconstructed from the figures that the PipelineRL paper prints about one H100, not measured: +-1-2 % up to 192,
# +-10 % beyond. In tokens per flash.
_PAPER_RATES = (
    *(0.1402, 0.2716, 0.3842, 0.4677, 0.5218, 0.5543, 0.5735, 0.5851),
    *(0.5924, 0.5971, 0.6002, 0.6024, 0.6040, 0.6051, 0.6060, 0.6067),
)
PAPER_STEP_COST = RateTable(tuple(range(64, 1025, 64)), _PAPER_RATES, pad_to=64, beyond="hold")
PAPER_TRAIN_TIME_PER_TOKEN = 4.919  # tau: flashes per token of one GPU
