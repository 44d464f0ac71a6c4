"""Weights of an engine that one thread replaces while another thread samples with them.

Two sets (`TwoWeightSets`): `stage` fills the idle set while steps use the active set; a later step swaps the two sets.
One set (`OneWeightSet`): `stage` overwrites the weights between two steps, and steps pause meanwhile.

No token is sampled from a mixture of versions. Every tensor is checked for its name, shape, dtype and finite values
just before it is copied.

Threads: any thread may call `stage` and `adopt`. One thread calls `begin_step` and `end_step`, and uses `active` and
`index` between the two.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from midflight.errors import NonFiniteWeightsError, WeightUpdateError
from midflight.protocols import IncomingWeights
from midflight.types import WeightLabel

# Copies a block of rows of a tensor; the number is that of the first row.
Writer = Callable[[Tensor, int], object]
# Size of a block (elements): it stays in the CPU's cache between its check and its copy.
_BLOCK_ELEMENTS = 1 << 18
# Longest wait of a step for weights in use by `stage`, so that its thread can serve other calls (seconds).
_PAUSE_S = 0.05


class WeightSet(Protocol):
    """One set of weights in the layout of the engine, with functions that fill it."""

    @property
    def writers(self) -> Mapping[str, Writer]:
        """Functions that copy a tensor into the set block by block, by Hugging Face parameter name."""
        ...

    def begin(self) -> None:
        """Prepare to be filled. A fill that stopped halfway leaves nothing behind."""
        ...


Weights = TypeVar("Weights", bound=WeightSet)


class WeightSets(ABC, Generic[Weights]):
    """The weights that steps use, and their replacement; every version must have the names, shapes and dtypes of the
    first weights.

    `active`: the weights for this step.
    `index`: number of the active set, 0 or 1.
    `num_changes`: number of times that a step began with other tensors than the step before.
    Raises: WeightUpdateError if the first weights lack a name, have an unknown name, or are not finite.
    """

    def __init__(self, first: Weights, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.active, self.index, self.num_changes = first, 0, 0
        self._expected = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        self._label = WeightLabel(0, 0)
        self._wanted: int | None = None
        self._one_stage = threading.Lock()
        self._changed = threading.Condition()  # guards the label, the wish and what is staged
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        unknown, missing = sorted(weights.keys() - first.writers), sorted(first.writers.keys() - weights.keys())
        if unknown or missing:
            raise WeightUpdateError(
                f"weight names do not match: missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        first.begin()
        for name, tensor in weights.items():
            _write(first, name, tensor)

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._label.version

    def set_first_version(self, version: int) -> None:
        """Give the first weights their version."""
        self._label = WeightLabel(version, version)

    def adopt(self, version: int) -> None:
        """Ask for this version or a newer one; no effect if the version is not newer.

        If weights of another lineage are staged, `version` counts in their lineage and replaces an older wish.
        """
        with self._changed:
            if self._other_lineage() or version > max(self._label.version, self._wanted or 0):
                self._wanted = version

    def stage(self, incoming: IncomingWeights) -> None:
        """Take new weights; return when they are complete. If another thread stages already, wait for its end.

        On CUDA, `incoming.tensors` runs with the stream of this method as the current stream.
        Raises: WeightUpdateError, NonFiniteWeightsError naming the tensor; then the rest of `incoming.tensors` has been
        taken, unless it raised an error itself. An error of `incoming.tensors` replaces every other error.
        """
        label = incoming.label
        with self._one_stage:
            if not self._relabel(label):
                self._replace(label, incoming.tensors)

    @abstractmethod
    def begin_step(self, idle: bool) -> bool:
        """Adopt staged weights if they are due; return False if there are no weights to sample with.

        `idle`: no sequence is in flight, so the version may go back to that of another lineage.
        Raises: WeightUpdateError once if the only weights were lost in a failed update.
        """

    @abstractmethod
    def end_step(self) -> None:
        """Release the weights; called after every `begin_step` that returned True."""

    @abstractmethod
    def _other_lineage(self) -> bool: ...

    @abstractmethod
    def _relabel(self, label: WeightLabel) -> bool:
        """Stage the label alone if a set has its tensors already; return False if not."""

    @abstractmethod
    def _replace(self, label: WeightLabel, tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    def _fill(self, target: Weights, label: WeightLabel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        target.begin()
        with self._on_stream():
            iterator = iter(tensors)
            try:
                self._write_all(target, iterator)
            except WeightUpdateError as error:
                for _ in iterator:  # a collective receive must end, and it may know a better reason
                    pass
                raise type(error)(f"version {label.version} of the weights is refused: {error}") from error
            if self._stream is not None:
                self._stream.synchronize()

    def _write_all(self, target: Weights, tensors: Iterable[tuple[str, Tensor]]) -> None:
        missing = set(self._expected)
        for name, tensor in tensors:
            if name not in missing:
                known = name in self._expected
                raise WeightUpdateError(f"{name} came twice" if known else f"the engine has no weight {name}")
            shape, dtype = self._expected[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise WeightUpdateError(
                    f"{name}: expected {tuple(shape)} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
            _write(target, name, tensor)
            missing.discard(name)
            if self._stream is not None:
                self._stream.synchronize()  # the sender of the tensors may overwrite this one from now on
        if missing:
            raise WeightUpdateError(f"weights are missing: {sorted(missing)}")

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        # Steps may still read the set that is filled now.
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        return torch.cuda.stream(self._stream)


class TwoWeightSets(WeightSets[Weights]):
    """Replacement without a pause. `make` allocates the second set at the first update: fixed weights need one set."""

    def __init__(
        self, first: Weights, weights: Mapping[str, Tensor], device: torch.device, make: Callable[[], Weights]
    ) -> None:
        super().__init__(first, weights, device)
        self._make = make
        self._idle: Weights | None = None
        self._idle_label: WeightLabel | None = None  # None: incomplete
        self._staged: WeightLabel | None = None  # tensors in the active or in the idle set

    def begin_step(self, idle: bool) -> bool:
        with self._changed:
            staged = self._staged
            if staged is None or self._wanted is None or staged.version < self._wanted:
                return True
            if staged.version < self._label.version and not idle:
                return True
            if not staged.has_tensors_of(self._label):
                assert self._idle is not None
                self.active, self._idle = self._idle, self.active
                self._idle_label, self.index = self._label, 1 - self.index
                self.num_changes += 1
            self._label, self._staged, self._wanted = staged, None, None
        return True

    def end_step(self) -> None:
        pass

    def _other_lineage(self) -> bool:
        return self._staged is not None and self._staged.lineage != self._label.lineage

    def _relabel(self, label: WeightLabel) -> bool:
        with self._changed:
            if not any(known and label.has_tensors_of(known) for known in (self._label, self._idle_label)):
                return False
            self._staged = label
            return True

    def _replace(self, label: WeightLabel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._changed:
            self._staged = self._idle_label = None
        if self._idle is None:
            self._idle = self._make()
        self._fill(self._idle, label, tensors)
        with self._changed:
            self._staged = self._idle_label = label


class OneWeightSet(WeightSets[Weights]):
    """Replacement with a pause, for models of which two sets do not fit.

    Staged weights are in use as soon as they are complete, also if nobody has asked for their version yet. After a
    failed update there are no weights: nothing is sampled until the next complete version.
    """

    def __init__(self, first: Weights, weights: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__(first, weights, device)
        self._stepping = self._replacing = False
        self._lost: WeightUpdateError | None = None  # set when an update fails; raised by the next step
        self._usable = True
        self._replaced = False

    def begin_step(self, idle: bool) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_ready() or self._lost is not None, _PAUSE_S):
                return False
            if self._lost is not None:
                error, self._lost = self._lost, None
                raise error
            self.num_changes += self._replaced
            self._replaced, self._stepping = False, True
            return True

    def end_step(self) -> None:
        with self._changed:
            self._stepping = False
            self._changed.notify_all()

    def _is_ready(self) -> bool:
        return self._usable and not self._replacing

    def _other_lineage(self) -> bool:
        return False

    def _relabel(self, label: WeightLabel) -> bool:
        with self._changed:
            if not (self._usable and label.has_tensors_of(self._label)):
                return False
            self._label = label
            return True

    def _replace(self, label: WeightLabel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._changed:
            self._replacing = True
            self._changed.wait_for(lambda: not self._stepping)
        complete = False
        try:
            self._fill(self.active, label, tensors)
            complete = True
        finally:
            with self._changed:
                self._replacing, self._usable = False, complete
                if complete:
                    self._label, self._replaced, self._lost = label, True, None
                else:
                    self._lost = WeightUpdateError(
                        f"the engine has no weights: the update to version {label.version} failed, and with"
                        f" weight_sets = 1 it had overwritten version {self._label.version}; send a complete version"
                    )
                self._changed.notify_all()


def weight_sets(
    num_sets: int, first: Weights, weights: Mapping[str, Tensor], device: torch.device, make: Callable[[], Weights]
) -> WeightSets[Weights]:
    """Fill the first set and return one or two sets; `make` allocates the second one."""
    return OneWeightSet(first, weights, device) if num_sets == 1 else TwoWeightSets(first, weights, device, make)


def copy_rows(target: Tensor) -> Writer:
    """Return a writer that copies blocks into a tensor of the same shape."""
    return lambda block, start: (
        target.narrow(0, start, len(block)).copy_(block) if target.dim() else target.copy_(block)
    )


@torch.inference_mode()
def _write(target: WeightSet, name: str, tensor: Tensor) -> None:
    """Check a tensor and copy it. Raises: NonFiniteWeightsError."""
    write = target.writers[name]
    for start, block in _blocks(tensor):
        # The minimum and maximum propagate NaN, at a tenth of the cost of `isfinite`.
        if not all(map(math.isfinite, block.aminmax())):
            raise NonFiniteWeightsError(f"{name} has NaN or infinite values")
        write(block, start)


def _blocks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Split the tensor into blocks of rows, about _BLOCK_ELEMENTS elements each, with the number of the first row."""
    if not tensor.numel():
        return
    if not tensor.dim():
        yield 0, tensor
        return
    num_rows = max(1, _BLOCK_ELEMENTS // tensor[0].numel())
    for start in range(0, len(tensor), num_rows):
        yield start, tensor[start : start + num_rows]
