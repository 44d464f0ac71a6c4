"""Pictures of docs/planner.md can be drawn; the golden tests check their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.planner_figures import FIGURES

ROOT = Path(__file__).parents[3]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "planner_figures.json").read_text())


def test_picture_and_numbers_are_reproduced(tmp_path: Path) -> None:
    numbers = FIGURES["collation"](tmp_path)
    assert (tmp_path / "planner_collation.png").read_bytes().startswith(b"\x89PNG")
    assert numbers.keys() == RESULT["collation"].keys()
    for case, row in numbers.items():
        assert row == pytest.approx(RESULT["collation"][case], rel=1e-3), case


def test_page_shows_every_picture() -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    assert list(RESULT) == list(FIGURES)
    for name in FIGURES:
        assert f"images/planner_{name}.png" in page
        assert (ROOT / "docs" / "images" / f"planner_{name}.png").exists()
