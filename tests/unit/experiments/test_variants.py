"""Parsing of schedules and losses as listed on the command line."""

from __future__ import annotations

import pytest

from midflight.errors import RecipeError
from midflight.experiments.variants import parse_variants


def test_types_and_keys_are_parsed() -> None:
    april, conventional, bounded = parse_variants(
        "schedule", "april, conventional:steps_per_rl_step=4,bounded:max_lag=2:updates=x"
    )
    assert (april.text, april.overrides) == ("april", ("schedule.type=april",))
    assert conventional.text == "conventional:steps_per_rl_step=4"
    assert conventional.overrides == ("schedule.type=conventional", "schedule.steps_per_rl_step=4")
    assert bounded.overrides == ("schedule.type=bounded", "schedule.max_lag=2", "schedule.updates=x")


@pytest.mark.parametrize(
    "text",
    ["", "pipeline,", "pipeline,,april", ":max_lag=2", "bounded:", "bounded:max_lag", "bounded:max_lag=", "bounded:=2"],
)
def test_a_malformed_list_is_an_error(text: str) -> None:
    with pytest.raises(RecipeError, match="--schedules"):
        parse_variants("schedule", text)


def test_a_type_may_be_an_import_path() -> None:
    mine, bounded = parse_variants("schedule", "mine:InTurns:schedule.options.pause=2,bounded")
    assert mine.overrides == ("schedule.type=mine:InTurns", "schedule.options.pause=2")
    assert bounded.overrides == ("schedule.type=bounded",)


def test_a_second_type_is_an_error() -> None:
    with pytest.raises(RecipeError, match="'type=april' in 'pipeline:type=april'"):
        parse_variants("schedule", "pipeline:type=april")


def test_a_loss_may_need_keys_of_other_sections() -> None:
    grpo, ppo = parse_variants("loss", "grpo:clip_high=0.3,ppo:advantage.type=value")
    assert grpo.overrides == ("loss.type=grpo", "loss.clip_high=0.3")
    assert ppo.overrides == ("loss.type=ppo", "advantage.type=value")
    with pytest.raises(RecipeError, match="--losses: 'clip_high' in 'grpo:clip_high'"):
        parse_variants("loss", "grpo:clip_high")
