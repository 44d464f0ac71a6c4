"""Two sets of weights: one serves while the other is filled, then they change places.

So no token is sampled from a mixture, and an update that fails has changed nothing. Filling can be spread over several
steps, which keeps the pause of an update short however large the model is. Every tensor is checked for NaN and infinity
just before it is copied.
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
# Elements of a tensor that are checked in one piece.
_CHECKED_ELEMENTS = 1 << 22


class WeightSet(Protocol):
    @property
    def writers(self) -> Mapping[str, Sequence[Writer]]:
        """For every Hugging Face parameter name, what puts a tensor of that name into its place, in pieces."""
        ...

    @property
    def finishers(self) -> Sequence[Callable[[], None]]:
        """What is left to do when all tensors are in their places."""
        ...


Weights = TypeVar("Weights", bound=WeightSet)


class WeightSets(Generic[Weights]):
    """`active` serves. Names, shapes and dtypes of every update must be those of the first weights.

    Raises: WeightUpdateError if the first weights lack a name, have one too many, or are not finite.
    """

    def __init__(self, make: Callable[[], Weights], weights: Mapping[str, Tensor]) -> None:
        self._make = make
        self.active = make()
        self._idle: Weights | None = None  # made when the first update comes: a server of fixed weights needs one set
        self._expected = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        self._remaining: Iterator[Callable[[], object]] | None = None
        self.num_swaps = 0
        _check_names(self.active.writers.keys(), weights.keys())
        for work in _filling(self.active, weights):
            work()

    @property
    def pending(self) -> bool:
        return self._remaining is not None

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Raises: WeightUpdateError if a name, shape or dtype does not fit, or an update is pending."""
        if self.pending:
            raise WeightUpdateError("another weight update is pending")
        _check_names(self._expected.keys(), weights.keys())
        for name, (shape, dtype) in self._expected.items():
            new = weights[name]
            if new.shape != shape or new.dtype != dtype:
                raise WeightUpdateError(f"{name}: expected {tuple(shape)} {dtype}, got {tuple(new.shape)} {new.dtype}")
        if self._idle is None:
            self._idle = self._make()
        self._remaining = iter(_filling(self._idle, weights))

    @torch.inference_mode()
    def proceed(self, budget_s: float | None) -> bool:
        """Copy until done or for `budget_s` seconds, at least one piece; True once the sets have changed places.

        Raises: NonFiniteWeightsError naming the tensor; the update is then over, and `active` goes on serving.
        """
        assert self._remaining is not None, "no update has begun"
        assert self._idle is not None
        deadline = None if budget_s is None else time.perf_counter() + budget_s
        for work in self._remaining:
            try:
                work()
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
    """The part of an EngineModel that is about new weights."""

    _sets: WeightSets[Weights]

    @property
    def weight_set(self) -> int:
        return self._sets.num_swaps % 2

    def begin_update(self, weights: Mapping[str, Tensor]) -> None:
        self._sets.begin(weights)

    def continue_update(self, budget_s: float | None) -> bool:
        return self._sets.proceed(budget_s)


def _filling(target: WeightSet, weights: Mapping[str, Tensor]) -> list[Callable[[], object]]:
    """The pieces of work that check these weights and bring them into the set."""
    pieces: list[Callable[[], object]] = []
    for name, tensor in weights.items():
        pieces += [functools.partial(_check_finite, name, part) for part in _parts(tensor)]
        pieces += [functools.partial(write, tensor) for write in target.writers[name]]
    return [*pieces, *target.finishers]


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """The tensor in blocks of rows, of about _CHECKED_ELEMENTS each."""
    if not tensor.dim() or not tensor.numel():
        return [tensor]
    return torch.split(tensor, max(1, _CHECKED_ELEMENTS // tensor[0].numel()))


def _check_finite(name: str, part: Tensor) -> None:
    """Raises: NonFiniteWeightsError."""
    # Extremes pass NaN on, and cost a tenth of what `isfinite` does.
    if part.numel() and not all(map(math.isfinite, part.aminmax())):
        raise NonFiniteWeightsError(f"{name} has NaN or infinite values")


def _check_names(expected: Set[str], given: Set[str]) -> None:
    unknown, missing = sorted(given - expected), sorted(expected - given)
    if unknown or missing:
        raise WeightUpdateError(f"weight names do not match: missing {missing or 'none'}, unknown {unknown or 'none'}")
