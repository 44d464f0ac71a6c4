"""The Chrome trace: one time line with names, also after killed processes and reboots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midflight.tracing import spans
from midflight.tracing.chrome import write_chrome_trace
from midflight.tracing.spans import Tracer

Event = dict[str, Any]
SECOND_NS = 10**9


@pytest.fixture
def merge(tmp_path: Path) -> Callable[..., list[Event]]:
    def merge(*files: Path) -> list[Event]:
        write_chrome_trace(files, tmp_path / "trace.json")
        events: list[Event] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        return events

    return merge


def complete(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def test_times_are_microseconds_from_the_earliest_span(tmp_path: Path, merge: Callable[..., list[Event]]) -> None:
    with Tracer(tmp_path / "rollout", "rollout") as tracer:
        tracer.add("decode", 5_000_000, 5_002_500)
        tracer.add("update", 5_002_500, 5_002_501, version=3)
    with Tracer(tmp_path / "trainer", "trainer") as tracer:
        tracer.add("train", 4_999_000, 5_001_000)
    events = {event["name"]: event for event in complete(merge(tmp_path / "rollout", tmp_path / "trainer"))}
    assert {name: (event["ts"], event["dur"]) for name, event in events.items()} == {
        "train": (0.0, 2.0),
        "decode": (1.0, 2.5),
        "update": (3.5, 0.001),
    }
    assert events["update"]["args"] == {"version": 3}


def test_every_track_has_its_process_and_thread_name(tmp_path: Path, merge: Callable[..., list[Event]]) -> None:
    for process in ("rollout", "trainer"):
        with Tracer(tmp_path / process, process) as tracer:
            tracer.add("wait", 0, 1)
    events = merge(tmp_path / "rollout", tmp_path / "trainer")
    metadata = [event for event in events if event["ph"] == "M"]
    names = {
        kind: {(event["pid"], event["args"]["name"]) for event in metadata if event["name"] == kind}
        for kind in ("process_name", "thread_name")
    }
    assert {name for _, name in names["process_name"]} == {"rollout", "trainer"}
    assert {name for _, name in names["thread_name"]} == {"main"}
    assert {event["pid"] for event in complete(events)} <= {pid for pid, _ in names["process_name"]}


def test_nested_spans_stay_nested_on_one_track(tmp_path: Path, merge: Callable[..., list[Event]]) -> None:
    with Tracer(tmp_path / "rollout", "rollout") as tracer:
        for _ in range(50):
            with tracer.span("step"), tracer.span("decode"), tracer.span("sample"):
                pass
    events = complete(merge(tmp_path / "rollout"))
    assert len(events) == 150
    assert len({(event["pid"], event["tid"]) for event in events}) == 1
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    open_until: list[int] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start_ns, end_ns = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        while open_until and open_until[-1] <= start_ns:
            open_until.pop()
        assert all(end_ns <= end for end in open_until), "a span ends after its parent"
        open_until.append(end_ns)


def test_incomplete_lines_of_a_killed_process_are_skipped(tmp_path: Path, merge: Callable[..., list[Event]]) -> None:
    path = tmp_path / "trainer"
    for start in (0, 100):
        with Tracer(path, "trainer") as tracer:
            tracer.add("train", start, start + 10)
        path.write_text(path.read_text() + '["train",20')
    assert [event["ts"] for event in complete(merge(path))] == [0.0, 0.1]


def test_the_wall_clock_orders_spans_across_a_reboot(
    tmp_path: Path, merge: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock restarts at a boot; the second process ran a minute after the first."""
    path = tmp_path / "trainer"
    for clock, unix_minus_monotonic_ns in (("boot 1", 0), ("boot 2", 160 * SECOND_NS)):
        header = {"process": "trainer", "thread": "main", "pid": 1, "clock": clock}
        header["unix_minus_monotonic_ns"] = unix_minus_monotonic_ns
        monkeypatch.setattr(spans, "_header", lambda *_, header=header: header)
        with Tracer(path, "trainer") as tracer:
            start_ns = 100 * SECOND_NS if clock == "boot 1" else 0
            tracer.add("train", start_ns, start_ns + SECOND_NS)
    assert [event["ts"] / 1e6 for event in complete(merge(path))] == [0.0, 60.0]


def test_wall_clock_adjustments_move_no_spans_within_a_boot(
    tmp_path: Path, merge: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for process, unix_minus_monotonic_ns in (("rollout", 0), ("trainer", 7 * SECOND_NS)):
        header = {"process": process, "thread": "main", "pid": 1, "clock": "boot 1"}
        header["unix_minus_monotonic_ns"] = unix_minus_monotonic_ns
        monkeypatch.setattr(spans, "_header", lambda *_, header=header: header)
        with Tracer(tmp_path / process, process) as tracer:
            tracer.add("wait", 0, SECOND_NS)
    assert [event["ts"] for event in complete(merge(tmp_path / "rollout", tmp_path / "trainer"))] == [0.0, 0.0]


def test_a_run_without_spans_has_an_empty_trace(merge: Callable[..., list[Event]]) -> None:
    assert merge() == []
