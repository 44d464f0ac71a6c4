"""The pictures of docs/planner.md can be drawn; their numbers are the golden tests' business."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "planner_figures.json").read_text())


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Path], dict[str, Any]]]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found: dict[str, Callable[[Path], dict[str, Any]]] = runpy.run_path(
        str(ROOT / "benchmarks" / "planner_figures.py")
    )["FIGURES"]
    return found


def test_a_picture_and_its_numbers(figures: dict[str, Callable[[Path], dict[str, Any]]], tmp_path: Path) -> None:
    numbers = figures["collation"](tmp_path)
    assert (tmp_path / "planner_collation.png").read_bytes().startswith(b"\x89PNG")
    assert numbers.keys() == RESULT["collation"].keys()
    for case, row in numbers.items():
        assert row == pytest.approx(RESULT["collation"][case], rel=1e-3), case


def test_every_picture_of_the_page_is_drawn_and_has_numbers(
    figures: dict[str, Callable[[Path], dict[str, Any]]],
) -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    assert list(RESULT) == list(figures)
    for name in figures:
        assert f"images/planner_{name}.png" in page
        assert (ROOT / "docs" / "images" / f"planner_{name}.png").exists()
