"""Staging and adopting weights, with sets of two small tensors: who gets which version, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from midflight.engine.weight_sets import OneWeightSet, TwoWeightSets, WeightSets, Writer, copy_rows
from midflight.errors import NonFiniteWeightsError, WeightsReplacedError, WeightUpdateError
from midflight.protocols import IncomingWeights

CPU = torch.device("cpu")


class TwoTensors:
    """Implements WeightSet."""

    def __init__(self) -> None:
        self.a, self.b = torch.zeros(3), torch.zeros(2, 2)
        self.writers: dict[str, Writer] = {"a": copy_rows(self.a), "b": copy_rows(self.b)}

    def begin(self) -> None:
        pass

    def value(self) -> float:
        """Return the number in both tensors."""
        assert len({*self.a.tolist(), *self.b.flatten().tolist()}) == 1, "a mixture of versions"
        return self.a[0].item()


def tensors(value: float) -> list[tuple[str, Tensor]]:
    return [("a", torch.full((3,), float(value))), ("b", torch.full((2, 2), float(value)))]


def incoming(version: int, content: int | None = None, lineage: str = "") -> IncomingWeights:
    content = version if content is None else content
    return IncomingWeights(version, content, tensors(content), lineage)


def two_sets() -> WeightSets[TwoTensors]:
    return TwoWeightSets(TwoTensors(), dict(tensors(0)), CPU, TwoTensors)


def one_set() -> WeightSets[TwoTensors]:
    return OneWeightSet(TwoTensors(), dict(tensors(0)), CPU)


def sampled(sets: WeightSets[TwoTensors], idle: bool = False) -> tuple[int, float]:
    """Run a step; return its version and the value of its weights."""
    assert sets.begin_step(idle)
    result = sets.version, sets.active.value()
    sets.end_step()
    return result


def test_staged_weights_wait_until_they_are_asked_for() -> None:
    sets = two_sets()
    sets.stage(incoming(1))
    assert sampled(sets) == (0, 0)
    sets.adopt(1)
    assert sampled(sets) == (1, 1)
    sets.adopt(2)
    assert sampled(sets) == (1, 1)
    sets.stage(incoming(3))
    assert sampled(sets) == (3, 3)
    assert (sets.index, sets.num_changes) == (0, 2)


def test_newer_stage_replaces_a_staged_version() -> None:
    sets = two_sets()
    sets.stage(incoming(1))
    sets.stage(incoming(2))
    sets.adopt(1)
    assert sampled(sets) == (2, 2)


def test_older_version_is_not_adopted() -> None:
    sets = two_sets()
    sets.set_first_version(5)
    sets.stage(incoming(4))
    sets.adopt(4)
    assert sampled(sets, idle=True) == (5, 0)


def test_other_lineage_goes_back_when_nothing_is_in_flight() -> None:
    sets = two_sets()
    sets.set_first_version(5)
    sets.stage(incoming(5, lineage="again"))  # equal numbers, other tensors
    sets.adopt(5)
    assert sampled(sets) == (5, 5)
    sets.stage(incoming(2, lineage="third"))
    sets.adopt(2)
    assert sampled(sets) == (5, 5)
    assert sampled(sets, idle=True) == (2, 2)


@pytest.mark.parametrize("make", [two_sets, one_set])
def test_equal_content_changes_the_number_only(make: type) -> None:
    sets = make()
    sets.stage(IncomingWeights(1, 0, iter(lambda: pytest.fail("a tensor was taken"), None)))
    sets.adopt(1)
    assert sampled(sets) == (1, 0)
    sets.stage(incoming(2))
    sets.stage(IncomingWeights(3, 2, iter(lambda: pytest.fail("a tensor was taken"), None)))
    sets.adopt(3)
    assert sampled(sets) == (3, 2)
    assert sets.num_changes == 1


BROKEN = [
    (tensors(1)[:1], r"weights are missing: \['b'\]"),
    ([*tensors(1), ("c", torch.zeros(1))], "the engine has no weight c"),
    ([*tensors(1)[:1], *tensors(1)], "a came twice"),
    ([("a", torch.zeros(4)), *tensors(1)[1:]], r"a: expected \(3,\) torch.float32, got \(4,\) torch.float32"),
    ([("a", torch.zeros(3).double()), *tensors(1)[1:]], r"a: expected .* got \(3,\) torch.float64"),
    ([("a", torch.tensor([0, torch.nan, 0])), *tensors(1)[1:]], "a has NaN or infinite values"),
    ([*tensors(1)[:1], ("b", torch.full((2, 2), -torch.inf))], "b has NaN or infinite values"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_refused_weights_leave_the_old_ones(broken: list[tuple[str, Tensor]], message: str) -> None:
    sets = two_sets()
    remaining = iter(broken)
    with pytest.raises(WeightUpdateError, match=f"version 1 of the weights is refused: {message}"):
        sets.stage(IncomingWeights(1, 1, remaining))
    assert not list(remaining), "a collective receive would not end"
    sets.adopt(1)
    assert sampled(sets) == (0, 0)
    sets.stage(incoming(2))
    assert sampled(sets) == (2, 2)


def test_replaced_weights_hide_a_value_read_from_torn_memory() -> None:
    def torn() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.full((3,), torch.nan)
        raise WeightsReplacedError("a newer version is being written")

    sets = two_sets()
    with pytest.raises(WeightsReplacedError):
        sets.stage(IncomingWeights(1, 1, torn()))
    with pytest.raises(NonFiniteWeightsError):
        sets.stage(IncomingWeights(1, 1, [("a", torch.full((3,), torch.nan))]))


def test_incomplete_set_is_not_adopted() -> None:
    sets = two_sets()
    sets.stage(incoming(1))
    sets.adopt(1)

    def slow() -> Iterator[tuple[str, Tensor]]:
        first, second = tensors(2)
        yield first
        assert sampled(sets) == (0, 0)
        yield second

    sets.stage(IncomingWeights(2, 2, slow()))
    assert sampled(sets) == (2, 2)


def test_one_set_pauses_while_it_is_written() -> None:
    sets = one_set()
    assert sets.begin_step(False)
    started, ended = threading.Event(), threading.Event()

    def observed() -> Iterator[tuple[str, Tensor]]:
        started.set()
        first, second = tensors(1)
        yield first
        assert not sets.begin_step(False)
        yield second

    def stage() -> None:
        sets.stage(IncomingWeights(1, 1, observed()))
        ended.set()

    thread = threading.Thread(target=stage)
    thread.start()
    assert (sets.version, sets.active.value()) == (0, 0)
    assert not started.is_set()  # not before the end of the step
    sets.end_step()
    thread.join()
    assert ended.is_set()
    assert sampled(sets) == (1, 1)


def test_one_set_is_lost_when_its_update_fails() -> None:
    sets = one_set()
    with pytest.raises(NonFiniteWeightsError):
        sets.stage(IncomingWeights(1, 1, [tensors(1)[0], ("b", torch.full((2, 2), torch.nan))]))
    with pytest.raises(WeightUpdateError, match=r"no weights: .* version 1 failed, .* overwritten version 0"):
        sets.begin_step(False)
    assert not sets.begin_step(False)
    sets.stage(incoming(2))
    assert sampled(sets) == (2, 2)
