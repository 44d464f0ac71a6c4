"""The table of built-in rewards in the documentation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from midflight.launch.rewards import REWARDS

PAGE = Path(__file__).parents[4] / "docs" / "tasks.md"
ROWS = dict(re.findall(r"^\| `(\w+)` \|(.*)$", PAGE.read_text(), re.MULTILINE))


def test_every_reward_is_in_the_table() -> None:
    assert ROWS.keys() >= REWARDS.known.keys()


@pytest.mark.parametrize("name", sorted(REWARDS.known))
def test_every_option_of_a_reward_is_in_its_row(name: str) -> None:
    options = inspect.signature(REWARDS.find(name)).parameters.keys() - {"problem", "response"}
    assert {option for option in options if f"`{option}`" not in ROWS[name]} == set()
