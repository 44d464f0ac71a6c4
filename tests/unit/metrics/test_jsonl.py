"""metrics.jsonl survives kills and resumed runs, and is readable while it grows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import RunDirectoryError
from midflight.metrics import jsonl
from midflight.metrics.jsonl import JsonlWriter, MetricsTail, json_text, read_metrics


def write_versions(path: Path, *versions: int, torn: str = "") -> None:
    path.write_text("".join(json.dumps({"version": version}) + "\n" for version in versions) + torn)


def versions(lines: list[dict[str, Any]]) -> list[int]:
    return [line["version"] for line in lines]


def test_lines_are_readable_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        for line in ({"version": 1, "reward/mean": 0.25}, {"version": 2, "lag/by_position": [1.0, 2.5]}):
            writer.write(line)
            assert read_metrics(path)[-1] == line
    assert path.read_text().count("\n") == 2


def test_new_run_does_not_write_into_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_versions(path, 1)
    with pytest.raises(FileExistsError):
        JsonlWriter(path)
    assert versions(read_metrics(path)) == [1]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"version": 1, "loss": float("nan"), "bins": [1.0, float("inf")], "more": {"x": -float("inf")}})
    assert read_metrics(path) == [{"version": 1, "loss": None, "bins": [1.0, None], "more": {"x": None}}]


@pytest.mark.parametrize("torn", ["", '{"version": 6, "rew', '{"version": 6}', "\0\0\0"])
def test_resume_keeps_lines_up_to_its_version(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_versions(path, 1, 2, 3, 4, 5, torn=torn)
    with JsonlWriter(path, resume_version=3) as writer:
        writer.write({"version": 4, "again": True})
    lines = read_metrics(path)
    assert versions(lines) == [1, 2, 3, 4]
    assert lines[-1] == {"version": 4, "again": True}


def test_resume_at_the_newest_version_only_removes_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_versions(path, 1, 2, torn='{"version": 3')
    JsonlWriter(path, resume_version=2).close()
    assert path.read_bytes() == b'{"version": 1}\n{"version": 2}\n'


def test_resume_at_version_zero_removes_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path, resume_version=0) as writer:
        writer.write({"version": 1})
    JsonlWriter(path, resume_version=0).close()
    assert read_metrics(path) == []


def test_a_tail_reads_a_long_file_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_versions(path, *range(1, 10), torn=json.dumps({"version": 10, "long": "x" * 100}) + "\n")
    monkeypatch.setattr(jsonl, "_MAX_READ_BYTES", 40)
    tail = MetricsTail(path)
    pieces = []
    while lines := tail.read():
        pieces.append(versions(lines))
    assert len(pieces) > 3
    assert [version for piece in pieces for version in piece] == list(range(1, 11))


def test_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_versions(path, 1, 2, torn='{"version": 3, "ess": 0.9')
    assert versions(read_metrics(path)) == [1, 2]


@pytest.mark.parametrize("damage", ["not json\n", "[1, 2]\n", "\n"])
def test_damaged_line_is_reported_with_the_file(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1}\n' + damage + '{"version": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is damaged"):
        read_metrics(path)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is damaged"):
        JsonlWriter(path, resume_version=5)
    assert path.read_text().endswith('{"version": 2}\n')


def test_tail_returns_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    write_versions(path, 1, 2, torn='{"vers')
    assert versions(tail.read()) == [1, 2]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ion": 3}\n')
    assert versions(tail.read()) == [3]
    assert tail.read() == []


def test_json_text_has_null_for_numbers_that_are_not_finite() -> None:
    result = {"accuracy": math.nan, "rows": [{"rate": -math.inf}, {"rate": 1.5}], "n": 0}
    assert json.loads(json_text(result), parse_constant=pytest.fail) == {
        "accuracy": None,
        "rows": [{"rate": None}, {"rate": 1.5}],
        "n": 0,
    }


def test_tail_rereads_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_versions(path, 1, 2, 3, 4)
    tail = MetricsTail(path)
    tail.read()
    JsonlWriter(path, resume_version=2).close()
    assert versions(tail.read()) == [1, 2]
    with JsonlWriter(path, resume_version=2) as writer:
        writer.write({"version": 3})
    assert versions(tail.read()) == [3]


def test_tail_rereads_a_truncated_file_that_has_grown_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_versions(path, 1, 2, 3)
    tail = MetricsTail(path)
    tail.read()
    with JsonlWriter(path, resume_version=1) as writer:
        for version in (2, 3, 4):
            writer.write({"version": version, "again": True})
    lines = tail.read()
    assert versions(lines) == [1, 2, 3, 4]
    assert all(line.get("again") for line in lines[1:])
