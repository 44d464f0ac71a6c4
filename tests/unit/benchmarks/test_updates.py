"""Benchmark of weight updates, on a tiny engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.updates import Load, Update, busy_processes, run_updates, summary, targets_of

from midflight.engine.pulling import PullingGenerator
from midflight.models.loading import weights_of
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model
from midflight.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender


def test_delay_is_the_extra_time_of_the_longest_step() -> None:
    assert Update((0.13, 0.15, 0.09)).longest_delay(plain_step_s=0.1) == pytest.approx(0.5)
    assert Update((0.08,)).longest_delay(plain_step_s=0.1) == 0


def test_summary_of_values() -> None:
    assert summary([1.0, 2.0, 3.0]) == {"median": 2.0, "p99": pytest.approx(2.98), "max": 3.0}


def test_targets_compare_median_delay_and_longest_update() -> None:
    row: dict[str, Any] = {"model": "demo", "engine": "embedded", "load": "quiet"}
    row |= {"longest_delay_steps": {"median": 1.6, "max": 3.0}, "steps_per_update": {"median": 3, "max": 8}}
    assert [(target["value"], target["limit"], target["holds"]) for target in targets_of(row)] == [
        (1.6, 1.5, False),
        (8, 8, True),
    ]


def test_busy_processes_end_with_the_block() -> None:
    with busy_processes(0):
        pass
    with pytest.raises(ZeroDivisionError), busy_processes(1):
        _ = 1 / 0


def test_updates_abort_no_request_and_skip_no_version(tmp_path: Path) -> None:
    model = tiny_model()
    sender, receiver = SharedMemorySender(tmp_path / "weights"), SharedMemoryReceiver(tmp_path / "weights")
    engine = PullingGenerator(tiny_engine(model, max_num_seqs=4, max_new_tokens=16), receiver)
    load = Load(engine, VOCAB_SIZE, sequences=4, new_tokens=16)
    updates, plain_steps_s = run_updates(load, sender, weights_of(model), num_updates=20)
    load.drain()
    assert all(1 <= len(update.steps_s) <= 8 for update in updates)
    assert len(updates) == 20
    assert plain_steps_s
    assert load.num_aborted == 0
    assert load.num_finished >= 16
    assert load.versions == set(range(21))
    sender.close()
    receiver.close()
