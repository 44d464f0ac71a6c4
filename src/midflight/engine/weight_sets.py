"""Two sets of weights: the active set is used while an update fills the idle set, then the two sets are swapped.

Therefore no token is sampled from a mixture of versions, and a failed update changes nothing. Filling can be spread
over several steps, which keeps the pause of an update short for a model of any size. Every tensor is checked for NaN
and infinity just before it is copied.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from midflight.errors import NonFiniteWeightsError, WeightUpdateError

Writer = Callable[[Tensor], object]
# Number of elements that are checked at a time.
_CHECKED_ELEMENTS = 1 << 22


class WeightSet(Protocol):
    """One set of weights in the layout of the engine, with functions that fill it."""

    @property
    def writers(self) -> Mapping[str, Sequence[Writer]]:
        """Functions that copy a tensor into the set, one part each, by Hugging Face parameter name."""
        ...

    @property
    def finishers(self) -> Sequence[Callable[[], None]]:
        """Functions to call after all tensors have been copied."""
        ...


Weights = TypeVar("Weights", bound=WeightSet)


class WeightSets(Generic[Weights]):
    """The active and the idle set; every update must have the names, shapes and dtypes of the first weights.

    Raises: WeightUpdateError if the first weights lack a name, have an unknown name, or are not finite.
    """

    def __init__(self, make: Callable[[], Weights], weights: Mapping[str, Tensor]) -> None:
        self._make = make
        self.active = make()
        self._idle: Weights | None = None  # allocated at the first update: a server with fixed weights needs one set
        self._expected = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        self._remaining: Iterator[Callable[[], object]] | None = None
        self.num_swaps = 0
        _check_names(self.active.writers.keys(), weights.keys())
        for step in _fill_steps(self.active, weights):
            step()

    @property
    def pending(self) -> bool:
        """True while an update has begun and not ended."""
        return self._remaining is not None

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Start an update.

        Raises: WeightUpdateError if a name, shape or dtype does not fit, or an update is pending.
        """
        if self.pending:
            raise WeightUpdateError("another weight update is pending; wait until it has ended")
        _check_names(self._expected.keys(), weights.keys())
        for name, (shape, dtype) in self._expected.items():
            new = weights[name]
            if new.shape != shape or new.dtype != dtype:
                raise WeightUpdateError(f"{name}: expected {tuple(shape)} {dtype}, got {tuple(new.shape)} {new.dtype}")
        if self._idle is None:
            self._idle = self._make()
        self._remaining = iter(_fill_steps(self._idle, weights))

    @torch.inference_mode()
    def proceed(self, budget_s: float | None) -> bool:
        """Copy weights for about `budget_s` seconds (None: to the end); return True once the sets are swapped.

        Every call makes at least one step.
        Raises: NonFiniteWeightsError naming the tensor; the update is then canceled, and `active` stays as it is.
        """
        assert self._remaining is not None, "no update has begun"
        assert self._idle is not None
        deadline = None if budget_s is None else time.perf_counter() + budget_s
        for step in self._remaining:
            try:
                step()
            except NonFiniteWeightsError:
                self._remaining = None
                raise
            if deadline is not None and time.perf_counter() >= deadline:
                return False
        self.active, self._idle = self._idle, self.active
        self._remaining = None
        self.num_swaps += 1
        return True


class UpdatedInFlight(Generic[Weights]):
    """The weight update methods of an EngineModel."""

    _sets: WeightSets[Weights]

    @property
    def weight_set(self) -> int:
        return self._sets.num_swaps % 2

    def begin_update(self, weights: Mapping[str, Tensor]) -> None:
        self._sets.begin(weights)

    def continue_update(self, budget_s: float | None) -> bool:
        return self._sets.proceed(budget_s)


def _fill_steps(target: WeightSet, weights: Mapping[str, Tensor]) -> list[Callable[[], object]]:
    """Return the steps that check these weights and copy them into the set, in order."""
    steps: list[Callable[[], object]] = []
    for name, tensor in weights.items():
        steps += [functools.partial(_check_finite, name, part) for part in _parts(tensor)]
        steps += [functools.partial(write, tensor) for write in target.writers[name]]
    return [*steps, *target.finishers]


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Split the tensor into blocks of rows, about _CHECKED_ELEMENTS elements each."""
    if not tensor.dim() or not tensor.numel():
        return [tensor]
    return torch.split(tensor, max(1, _CHECKED_ELEMENTS // tensor[0].numel()))


def _check_finite(name: str, part: Tensor) -> None:
    """Check one part of a tensor.

    Raises: NonFiniteWeightsError.
    """
    # The minimum and maximum propagate NaN, at a tenth of the cost of `isfinite`.
    if part.numel() and not all(map(math.isfinite, part.aminmax())):
        raise NonFiniteWeightsError(f"{name} has NaN or infinite values")


def _check_names(expected: Set[str], given: Set[str]) -> None:
    unknown, missing = sorted(given - expected), sorted(expected - given)
    if unknown or missing:
        raise WeightUpdateError(f"weight names do not match: missing {missing or 'none'}, unknown {unknown or 'none'}")
