"""Schedules as they are listed on the command line."""

from __future__ import annotations

import pytest

from midflight.bench.schedule_specs import parse_schedules
from midflight.errors import RecipeError


def test_a_list_of_types_and_keys() -> None:
    april, conventional, bounded = parse_schedules(
        "april, conventional:steps_per_rl_step=4,bounded:max_lag=2:updates=x"
    )
    assert (april.text, april.overrides) == ("april", ("schedule.type=april",))
    assert conventional.text == "conventional:steps_per_rl_step=4"
    assert conventional.overrides == ("schedule.type=conventional", "schedule.steps_per_rl_step=4")
    assert bounded.overrides == ("schedule.type=bounded", "schedule.max_lag=2", "schedule.updates=x")


@pytest.mark.parametrize(
    "text",
    ["", "pipeline,", "pipeline,,april", ":max_lag=2", "bounded:", "bounded:max_lag", "bounded:max_lag=", "bounded:=2"],
)
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(RecipeError, match="--schedules"):
        parse_schedules(text)


def test_a_schedule_has_one_type() -> None:
    with pytest.raises(RecipeError, match="'type=april' in 'pipeline:type=april'"):
        parse_schedules("pipeline:type=april")
