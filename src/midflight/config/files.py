"""Recipes as TOML files and command-line overrides; what is wrong with one, in one line."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic

from midflight.config.recipe import Recipe
from midflight.config.section import Section
from midflight.errors import RecipeError


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Raises: RecipeError, one line: which key and what would work.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    _anchor_paths(values, path.resolve().parent)
    _set_default_types(values)
    for override in overrides:
        _apply_override(values, override)
    try:
        return Recipe.model_validate(values)
    except pydantic.ValidationError as error:
        raise RecipeError(_one_line(error)) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML; `load_recipe` of it gives the same recipe."""
    lines: list[str] = []
    for section, values in recipe.model_dump(mode="json", exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def describe_recipe() -> list[tuple[str, str, str, str]]:
    """(key, type, default, description) of every recipe key, for `midflight config show --docs` and the README."""
    rows: list[tuple[str, str, str, str]] = []
    for name, section_field in Recipe.model_fields.items():
        for section in _section_types(section_field.annotation):
            rows += [
                (
                    f"{name}.{key}",
                    _type_name(field.annotation),
                    "required" if field.is_required() else _toml_value(field.get_default(call_default_factory=True)),
                    field.description or "",
                )
                for key, field in section.model_fields.items()
            ]
    return rows


def _section_types(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type):
        return [annotation]
    return [kind for kind in get_args(annotation) if isinstance(kind, type)]


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _toml_value(value: Any) -> str:
    """TOML of plain JSON-like values; json's strings, numbers and lists are TOML already."""
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def _anchor_paths(values: dict[str, Any], directory: Path) -> None:
    for section, key in (("model", "path"), ("run", "directory"), ("reference", "path"), ("weights", "directory")):
        table = values.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str((directory / Path(table[key]).expanduser()).resolve())


def _set_default_types(values: dict[str, Any]) -> None:
    """A section that sets keys but no `type` has the default one."""
    for section, field in Recipe.model_fields.items():
        table = values.setdefault(section, {}) if _kinds(section) else None
        if isinstance(table, dict):
            table.setdefault("type", field.default.type)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) < 2:
        raise RecipeError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    override_values: dict[str, Any] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        override_values = {part: override_values}
    _anchor_paths(override_values, Path.cwd())
    afresh = _kinds(parts[0]) or parts[0] == "task"  # whose other keys belong to the type
    if afresh and parts[-1] == "type" and values.get(parts[0], {}).get("type") != value:
        values[parts[0]] = {}
    if parts == ["trainer", "backend"] and values.get("trainer", {}).get("backend") != value:
        values.get("trainer", {}).pop("zero_stage", None)  # belongs to the old one
    _merge(values, override_values, key)


def _merge(values: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    for name, change in changes.items():
        if isinstance(change, dict) and isinstance(values.get(name, {}), dict):
            _merge(values.setdefault(name, {}), change, key)
        elif isinstance(change, dict):
            raise RecipeError(f"override {key}: {name} is a value, not a section")
        else:
            values[name] = change


def _one_line(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    kinds = _kinds(str(first["loc"][0])) if first["loc"] else {}
    location = [str(part) for part in first["loc"] if part not in kinds]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        kind = first["loc"][1] if len(first["loc"]) > 2 else ""
        owners = [other for other, section in kinds.items() if location[-1] in section.model_fields]
        if kind in kinds and owners:
            return f"{key} is a key of {' and '.join(owners)}, but {location[0]}.type = {kind!r}"
        return f"unknown key {key}{_suggestion(location)}"
    if first["type"] == "union_tag_invalid":
        return f"{key}.type: there is no {first['ctx']['tag']!r}; known are {', '.join(kinds)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    got = "" if isinstance(first["input"], dict) or not key else f", got {first['input']!r}"
    return f"{key}: {message}{got}" if key else message


def _kinds(section: str) -> dict[str, type[Section]]:
    """The sections that its `type` chooses from; none if it has only one form."""
    field = Recipe.model_fields.get(section)
    sections = _section_types(field.annotation) if field else []
    return {kind.model_fields["type"].default: kind for kind in sections} if len(sections) > 1 else {}


def _suggestion(location: list[str]) -> str:
    section = location[0] if len(location) > 1 else ""
    known = [key for key, *_ in describe_recipe() if key.startswith(section)]
    names = known if section else sorted({key.split(".")[0] for key in known})
    close = difflib.get_close_matches(".".join(location), names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(dict.fromkeys(names))}"
