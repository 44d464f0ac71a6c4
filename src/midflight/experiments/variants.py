"""Parser of compared variants: `conventional:steps_per_rl_step=4,april` or `grpo,ppo:advantage.type=value`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from midflight.config import Recipe
from midflight.config.section import members_of
from midflight.errors import RecipeError

_OPTIONS = {"schedule": "--schedules", "loss": "--losses"}  # the command-line option of each section


@dataclass(frozen=True, slots=True)
class Variant:
    """One change of a recipe: the text that the user typed, and the recipe overrides it stands for."""

    section: str  # the section whose `type` changes
    text: str
    overrides: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.]+", "-", self.text)


def parse_variants(section: str, text: str) -> tuple[Variant, ...]:
    """Parse a comma-separated list of types of `section`. Loading the recipe checks that types and keys exist.

    Raises: RecipeError if an item is not of the form TYPE[:KEY=VALUE]..., with KEY of the section or SECTION.KEY.
    """
    return tuple(_parse(section, part.strip()) for part in text.split(","))


def _parse(section: str, text: str) -> Variant:
    kind, *settings = text.split(":")
    if kind and settings and kind not in members_of(Recipe.model_fields[section].annotation) and "=" not in settings[0]:
        kind = f"{kind}:{settings.pop(0)}"  # an import path
    overrides = [f"{section}.type={kind}"]
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        key = key if "." in key or not key else f"{section}.{key}"
        # A second type would replace the first, and the row would have the wrong label.
        if not (key and equals and value) or key == f"{section}.type":
            raise RecipeError(f"{_OPTIONS[section]}: {setting!r} in {text!r} is not of the form key=value")
        overrides.append(f"{key}={value}")
    if not kind.strip():
        raise RecipeError(f"{_OPTIONS[section]}: {text!r} does not begin with the type of a {section}")
    return Variant(section, text, tuple(overrides))
