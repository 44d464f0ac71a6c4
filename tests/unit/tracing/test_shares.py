"""Shares of the time in spans."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.tracing.shares import time_shares
from midflight.tracing.spans import Tracer


def test_shares_count_nested_spans_once_and_add_up(tmp_path: Path) -> None:
    with Tracer(tmp_path / "spans.jsonl", "test") as tracer:
        for name, start, end in (("train", 100, 160), ("publish", 140, 150), ("wait", 180, 200)):
            tracer.add(name, start, end)
    shares = time_shares(tmp_path / "spans.jsonl")
    assert shares == pytest.approx({"train": 0.5, "wait": 0.2, "other": 0.2, "publish": 0.1})
    assert next(iter(shares)) == "train"


def test_no_spans_have_no_shares(tmp_path: Path) -> None:
    with Tracer(tmp_path / "spans.jsonl", "test"):
        pass
    assert time_shares(tmp_path / "spans.jsonl") == {}
