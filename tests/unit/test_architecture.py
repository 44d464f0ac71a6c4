"""Architecture page and import contracts compared with the existing packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in (ROOT / "src" / "midflight").glob("*/__init__.py"))
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_page_lists_every_package_once() -> None:
    listed = re.findall(r"^- `(\w+)`:", PAGE, re.MULTILINE)
    assert sorted(listed) == PACKAGES


def test_import_order_covers_every_package() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {name.strip() for layer in layers for name in layer.split("|")}
    assert {*PACKAGES, "types", "protocols", "errors"} == named


def test_package_root_holds_types_protocols_and_errors_only() -> None:
    modules = {path.stem for path in (ROOT / "src" / "midflight").glob("*.py")}
    assert modules == {"__init__", "__main__", "types", "protocols", "errors"}
