"""Pauses of weight updates, on an engine whose steps cost nothing."""

from __future__ import annotations

import pytest

from midflight.bench.updates import Load, Update, milliseconds, run_updates
from midflight.models.loading import weights_of
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model


def test_an_update_that_is_done_at_once_delays_by_its_call() -> None:
    assert Update(0.3, ()).delays(plain_step_s=0.1) == [0.3]


def test_an_update_in_slices_delays_each_token_by_what_its_step_took_longer() -> None:
    delays = Update(0.02, (0.13, 0.15, 0.09)).delays(plain_step_s=0.1)
    assert delays == pytest.approx([0.05, 0.05, 0.0])


def test_milliseconds() -> None:
    assert milliseconds([0.001, 0.002, 0.003]) == {
        "median": pytest.approx(2.0),
        "p99": pytest.approx(2.98),
        "max": pytest.approx(3.0),
    }


def test_updates_abort_nothing_and_every_version_samples_tokens() -> None:
    model = tiny_model()
    load = Load(tiny_engine(model, num_rows=4, max_new_tokens=8), VOCAB_SIZE, sequences=4, new_tokens=8)
    updates, plain_steps_s = run_updates(load, weights_of(model), num_updates=20)
    load.drain()
    assert len(updates) == 20
    assert plain_steps_s
    assert load.num_aborted == 0
    assert load.num_finished >= 4 + 20 * 2 * 4 // 8 - 4
    assert load.versions == set(range(21))
