"""Benchmark of weight updates, on a tiny engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from benchmarks.updates import Load, Update, milliseconds, run_updates
from torch import Tensor

from midflight.engine.engine import Engine
from midflight.models.loading import weights_of
from midflight.protocols import Generator
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model
from midflight.types import Completion


def test_immediate_update_delays_by_its_call() -> None:
    assert Update(0.3, ()).delays(plain_step_s=0.1) == [0.3]


def test_sliced_update_delays_by_the_extra_step_time() -> None:
    delays = Update(0.02, (0.13, 0.15, 0.09)).delays(plain_step_s=0.1)
    assert delays == pytest.approx([0.05, 0.05, 0.0])


def test_summary_in_milliseconds() -> None:
    assert milliseconds([0.001, 0.002, 0.003]) == {
        "median": pytest.approx(2.0),
        "p99": pytest.approx(2.98),
        "max": pytest.approx(3.0),
    }


class SlicedEngine:
    """Tiny engine that adopts an update after three more steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: tuple[int, Mapping[str, Tensor]] | None = None
        self._steps_left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def update_pending(self) -> bool:
        return self._pending is not None

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._pending, self._steps_left = (version, weights), 3

    def step(self) -> list[Completion]:
        if self._pending is not None:
            self._steps_left -= 1
            if not self._steps_left:
                self._engine.update_weights(*self._pending)
                self._pending = None
        return self._engine.step()


def test_update_is_pending_until_it_is_adopted() -> None:
    model = tiny_model()
    engine = SlicedEngine(tiny_engine(model, max_num_seqs=4, max_new_tokens=8))
    load = Load(cast(Generator, engine), VOCAB_SIZE, sequences=4, new_tokens=8)
    updates, _ = run_updates(load, weights_of(model), num_updates=5)
    load.drain()
    assert [len(update.pending_steps_s) for update in updates] == [3] * 5
    assert load.versions == set(range(6))


def test_updates_abort_no_request_and_skip_no_version() -> None:
    model = tiny_model()
    load = Load(tiny_engine(model, max_num_seqs=4, max_new_tokens=8), VOCAB_SIZE, sequences=4, new_tokens=8)
    updates, plain_steps_s = run_updates(load, weights_of(model), num_updates=20)
    load.drain()
    assert len(updates) == 20
    assert plain_steps_s
    assert load.num_aborted == 0
    assert load.num_finished >= 4 + 20 * 2 * 4 // 8 - 4
    assert load.versions == set(range(21))
