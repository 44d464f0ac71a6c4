"""Spans reach the file and the totals, and tracing errors never stop a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from midflight.tracing import spans
from midflight.tracing.reading import read_spans
from midflight.tracing.spans import Tracer


def recorded(path: Path) -> list[list[Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [line for line in lines if isinstance(line, list)]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one second at every reading."""
    now = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(spans, "monotonic_ns", lambda: next(now))


@pytest.mark.usefixtures("ticks")
def test_a_span_lasts_from_entry_to_exit() -> None:
    tracer = Tracer(None, "rollout")
    with tracer.span("decode"), tracer.span("prefill"):
        pass
    with tracer.span("decode"):
        pass
    assert tracer.total_s("prefill") == 1.0
    assert tracer.total_s("decode") == 3.0 + 1.0
    assert tracer.total_s("never") == 0.0


def test_a_span_is_recorded_when_its_block_raises(tmp_path: Path) -> None:
    with Tracer(tmp_path / "spans", "trainer") as tracer, pytest.raises(KeyError), tracer.span("train"):
        raise KeyError
    assert [record[0] for record in recorded(tmp_path / "spans")] == ["train"]


def test_the_file_names_process_and_thread(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    with Tracer(path, "rollout", thread_name="grader") as tracer:
        tracer.add("wait", 10, 30)
        tracer.add('a "quoted"\nname', 30, 40, rows=64)
    header = json.loads(path.read_text().splitlines()[1])
    assert (header["process"], header["thread"]) == ("rollout", "grader")
    assert recorded(path) == [["wait", 10, 30], ['a "quoted"\nname', 30, 40, {"rows": 64}]]


def test_arguments_of_any_type_are_json(tmp_path: Path) -> None:
    arguments = {"rows": 64, "share": 0.5, "is_last": True, "says": 'a "b"', "none": None, "list": [1, 2]}
    with Tracer(tmp_path / "spans", "rollout") as tracer:
        tracer.add("decode", 0, 1, **arguments)
    assert recorded(tmp_path / "spans") == [["decode", 0, 1, arguments]]


def test_spans_are_read_by_start_without_incomplete_lines(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    with Tracer(path, "rollout") as tracer:
        tracer.add("decode", 5, 9, rows=2)
        tracer.add("save", 1, 3)
    path.write_text(path.read_text() + '["deco')
    assert read_spans(path) == [("save", 1, 3, {}), ("decode", 5, 9, {"rows": 2})]


def test_spans_are_written_in_batches_and_on_request(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    tracer = Tracer(path, "rollout", flush_every=3)
    tracer.add("decode", 0, 1)
    tracer.add("decode", 1, 2)
    assert path.read_text() == ""
    tracer.add("decode", 2, 3)
    assert len(recorded(path)) == 3
    tracer.add("decode", 3, 4)
    tracer.flush()
    assert len(recorded(path)) == 4
    tracer.close()
    assert len(recorded(path)) == 4


def test_a_restart_begins_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    with Tracer(path, "trainer") as tracer:
        tracer.add("train", 0, 1)
    path.write_text(path.read_text() + '["trai')
    with Tracer(path, "trainer") as tracer:
        tracer.add("train", 5, 6)
    assert '["trai\n{' in path.read_text()
    assert '["train",0,1]' in path.read_text()
    assert '["train",5,6]' in path.read_text()


def test_spans_after_the_limit_count_only_in_totals(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    with Tracer(path, "rollout", flush_every=4, max_spans=6) as tracer:
        for index in range(20):
            tracer.add("decode", index * 10**9, (index + 1) * 10**9)
    assert [record[1] // 10**9 for record in recorded(path)] == list(range(6))
    assert tracer.total_s("decode") == 20.0


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    tracer = Tracer(full, "trainer", flush_every=1)
    with caplog.at_level(logging.WARNING):
        tracer.add("train", 0, 10**9)
        tracer.add("train", 10**9, 2 * 10**9)
        tracer.close()
    assert tracer.total_s("train") == 2.0
    assert [record.message[:21] for record in caplog.records] == ["no more spans are wri"]


def test_spans_after_close_count_only_in_totals(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "spans", "trainer")
    tracer.close()
    tracer.add("train", 0, 10**9)
    tracer.flush()
    tracer.close()
    assert recorded(tmp_path / "spans") == []
    assert tracer.total_s("train") == 1.0
