"""The reward `math` gives the results that math-verify's own test cases expect."""

from __future__ import annotations

import pytest
from benchmarks.tasks.rewards import SPEEDS, disagreements

from midflight.launch.rewards import REWARDS


@pytest.mark.slow
def test_cases_of_math_verify_have_its_results() -> None:
    assert list(disagreements()) == []


def test_speed_of_every_built_in_reward_is_measured() -> None:
    elsewhere = {"code", "judge"}  # a sandbox and a server take most of their time
    assert SPEEDS.keys() == REWARDS.known.keys() - elsewhere
