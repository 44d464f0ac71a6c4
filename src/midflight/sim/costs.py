"""Duration of one decode step of an engine: t(h), or t(h, c) if attention over long contexts counts.

A step samples one token for each of the h sequences in flight, which hold c response tokens in total. Times are in the
unit of the scenario (see the package), rates in tokens per unit of time; both are per engine. Fluid models also use
fractional h.
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

_ROUNDING = 1e-9  # so that 192.00000000000003 sequences are not padded to the next size

Counts = npt.ArrayLike  # numbers of sequences or tokens; may be fractional


class StepCost(Protocol):
    """Duration of a decode step, t(h, c) = t(h) + per_token * c, with t(0) = 0."""

    @property
    def per_token(self) -> float:
        """Extra time of a step per response token held by the sequences in flight."""
        ...

    @property
    def max_in_flight(self) -> float:
        """Largest h with a known cost; infinite if every h has one."""
        ...

    def step_times(self, num_in_flight: Counts) -> Float64Array:
        """Return t(h), elementwise. Raises: ScenarioError above `max_in_flight`."""
        ...


@dataclass(frozen=True, slots=True)
class RateTable:
    """Step cost t(h) = h' / U(h') from a table of rates U, where h' is h padded to a multiple of `pad_to`.

    Between two sizes, t is interpolated linearly. Below the first size, t is the first size's time: engines pad, and
    even a step with one sequence has a cost. Above the last size, beyond = "hold" keeps the last rate and "error"
    raises.

    Raises: ScenarioError naming `sizes` or `rates` unless sizes increase and neither rates nor step times decrease.
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
                f" lower num_in_flight, add larger sizes to the table, or set beyond = 'hold'"
            )
        padded = self.pad_to * np.ceil(asked / self.pad_to - _ROUNDING) if self.pad_to > 1 else asked
        sizes = np.array(self.sizes, np.float64)
        rates = np.array(self.rates, np.float64)
        times = np.interp(padded, sizes, sizes / rates)
        times = np.where(padded > sizes[-1], padded / rates[-1], times)
        return np.where(asked > 0, times, 0.0)


@dataclass(frozen=True, slots=True)
class AffineCost:
    """Step cost t(h, c) = base + per_sequence * h + per_token * c. Raises: ScenarioError if t would be 0."""

    base: float
    per_sequence: float = 0.0
    per_token: float = 0.0
    max_in_flight: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        if self.base + self.per_sequence <= 0:
            raise ScenarioError("base and per_sequence are both 0: a decode step would take no time; set one above 0")

    def step_times(self, num_in_flight: Counts) -> Float64Array:
        asked = np.asarray(num_in_flight, np.float64)
        return np.where(asked > 0, self.base + self.per_sequence * asked, 0.0)


def rates(cost: StepCost, num_in_flight: Counts) -> Float64Array:
    """Return U(h) = h / t(h) for sequences without response tokens, elementwise; 0 at h = 0."""
    asked = np.asarray(num_in_flight, np.float64)
    times = cost.step_times(asked)
    return np.divide(asked, times, out=np.zeros_like(asked), where=times > 0)


def _check_table(sizes: Sequence[int], rates: Sequence[float]) -> None:
    if not sizes:
        raise ScenarioError("sizes: the table is empty; list at least one size")
    if len(sizes) != len(rates):
        raise ScenarioError(f"rates: got {len(rates)} for {len(sizes)} sizes; list one rate per size")
    if sizes[0] < 1:
        raise ScenarioError(f"sizes: should be at least 1, got {sizes[0]}")
    if any(not 0 < rate < math.inf for rate in rates):
        raise ScenarioError(f"rates: should be greater than 0 and finite, got {list(rates)}")
    for (size, rate), (larger, its_rate) in itertools.pairwise(zip(sizes, rates, strict=True)):
        if larger <= size:
            raise ScenarioError(f"sizes: should increase, but {larger} comes after {size}")
        if its_rate < rate:
            raise ScenarioError(
                f"rates: should not decrease, but {size} sequences have {rate:g} and {larger} have {its_rate:g}"
            )
        if larger / its_rate < size / rate * (1 - 1e-3):
            raise ScenarioError(
                f"rates: a step with {larger} sequences would be shorter ({larger / its_rate:g}) than one with {size}"
                f" ({size / rate:g}); lower the rate of {larger}"
            )


# Tokens per flash. Reconstructed from the numbers that the PipelineRL paper prints for one H100, not measured:
# +-1-2 % up to 192 sequences, +-10 % above.
_PAPER_RATES = (
    *(0.1402, 0.2716, 0.3842, 0.4677, 0.5218, 0.5543, 0.5735, 0.5851),
    *(0.5924, 0.5971, 0.6002, 0.6024, 0.6040, 0.6051, 0.6060, 0.6067),
)
PAPER_STEP_COST = RateTable(tuple(range(64, 1025, 64)), _PAPER_RATES, pad_to=64, beyond="hold")
PAPER_TRAIN_TIME_PER_TOKEN = 4.919  # tau: flashes per token on one GPU
