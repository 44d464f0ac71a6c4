"""Schedules as a user lists them on the command line: `conventional:steps_per_rl_step=4,bounded:max_lag=2,april`."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.errors import RecipeError


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """One schedule. `text` is what the user typed, `overrides` what it means for a recipe."""

    text: str
    overrides: tuple[str, ...]


def parse_schedules(text: str) -> tuple[ScheduleSpec, ...]:
    """The schedules of a list. Whether there are such types and keys is for the recipe to say.

    Raises: RecipeError if one of them is not of the form TYPE[:KEY=VALUE]...
    """
    return tuple(_parse(part.strip()) for part in text.split(","))


def _parse(text: str) -> ScheduleSpec:
    kind, *settings = text.split(":")
    for setting in settings:
        key, equals, value = setting.partition("=")
        # A second type would start the section afresh, and the row would not say what was run.
        if not (key.strip() and equals and value.strip()) or key.strip() == "type":
            raise RecipeError(f"--schedules: {setting!r} in {text!r} is not of the form key=value")
    if not kind.strip():
        raise RecipeError(f"--schedules: {text!r} does not begin with the type of a schedule")
    return ScheduleSpec(text, (f"schedule.type={kind}", *(f"schedule.{setting}" for setting in settings)))
