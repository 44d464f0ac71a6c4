"""Recipes and scenarios as TOML files with command-line overrides; what is wrong with one, in one line."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import pydantic

from midflight.config.recipe import Recipe
from midflight.config.scenario import Scenario
from midflight.config.section import Section
from midflight.errors import MidflightError, RecipeError, ScenarioError

Document = TypeVar("Document", bound=Section)


@dataclass(frozen=True, slots=True)
class FileKind(Generic[Document]):
    """What a file of sections is read into, and how it is spoken of."""

    model: type[Document]
    noun: str
    error: type[MidflightError]
    paths: tuple[tuple[str, str], ...]  # keys that are paths: relative to the file
    of_the_type: frozenset[str] = frozenset()  # sections besides those with several forms that start afresh with a type

    def load(self, path: Path, overrides: Sequence[str]) -> Document:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise self.error(f"cannot read the {self.noun} {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise self.error(f"{path} is not valid TOML: {error}") from error
        self._anchor_paths(values, path.resolve().parent)
        self._set_default_types(values)
        for override in overrides:
            self._apply_override(values, override)
        try:
            return self.model.model_validate(values)
        except pydantic.ValidationError as error:
            raise self.error(self._one_line(error)) from error

    def describe(self) -> list[tuple[str, str, str, str]]:
        """(key, type, default, description) of every key."""
        rows: list[tuple[str, str, str, str]] = []
        for name, section_field in self.model.model_fields.items():
            for section in _section_types(section_field.annotation):
                rows += [
                    (
                        f"{name}.{key}",
                        _type_name(field.annotation),
                        "required"
                        if field.is_required()
                        else _toml_value(field.get_default(call_default_factory=True)),
                        field.description or "",
                    )
                    for key, field in section.model_fields.items()
                ]
        return rows

    def _anchor_paths(self, values: dict[str, Any], directory: Path) -> None:
        for section, key in self.paths:
            table = values.get(section)
            if isinstance(table, dict) and isinstance(table.get(key), str):
                table[key] = str((directory / Path(table[key]).expanduser()).resolve())

    def _set_default_types(self, values: dict[str, Any]) -> None:
        """A section that sets keys but no `type` has the default one."""
        for section, field in self.model.model_fields.items():
            kinds = self._kinds(section)
            if not kinds:
                continue
            table = values.get(section) if field.default is None else values.setdefault(section, {})
            if isinstance(table, dict):
                table.setdefault("type", next(iter(kinds)) if field.default is None else field.default.type)

    def _apply_override(self, values: dict[str, Any], override: str) -> None:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) < 2:
            raise self.error(f"override {override!r} is not of the form section.key=value")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # a bare word is a string
        override_values: dict[str, Any] = {parts[-1]: value}
        for part in reversed(parts[:-1]):
            override_values = {part: override_values}
        self._anchor_paths(override_values, Path.cwd())
        afresh = self._kinds(parts[0]) or parts[0] in self.of_the_type  # whose other keys belong to the type
        if afresh and parts[-1] == "type" and values.get(parts[0], {}).get("type") != value:
            values[parts[0]] = {}
        if parts == ["trainer", "backend"] and values.get("trainer", {}).get("backend") != value:
            values.get("trainer", {}).pop("zero_stage", None)  # belongs to the old one
        self._merge(values, override_values, key)

    def _merge(self, values: dict[str, Any], changes: dict[str, Any], key: str) -> None:
        for name, change in changes.items():
            if isinstance(change, dict) and isinstance(values.get(name, {}), dict):
                self._merge(values.setdefault(name, {}), change, key)
            elif isinstance(change, dict):
                raise self.error(f"override {key}: {name} is a value, not a section")
            else:
                values[name] = change

    def _one_line(self, error: pydantic.ValidationError) -> str:
        first = error.errors()[0]
        kinds = self._kinds(str(first["loc"][0])) if first["loc"] else {}
        location = [str(part) for part in first["loc"] if part not in kinds]
        key = ".".join(location)
        if first["type"] == "extra_forbidden":
            kind = first["loc"][1] if len(first["loc"]) > 2 else ""
            owners = [other for other, section in kinds.items() if location[-1] in section.model_fields]
            if kind in kinds and owners:
                return f"{key} is a key of {' and '.join(owners)}, but {location[0]}.type = {kind!r}"
            return f"unknown key {key}{self._suggestion(location)}"
        if first["type"] == "union_tag_invalid":
            return f"{key}.type: there is no {first['ctx']['tag']!r}; known are {', '.join(kinds)}"
        if first["type"] == "missing":
            return f"{key} is missing"
        message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
        got = "" if isinstance(first["input"], dict) or not key else f", got {first['input']!r}"
        return f"{key}: {message}{got}" if key else message

    def _kinds(self, section: str) -> dict[str, type[Section]]:
        """The sections that its `type` chooses from; none if it has only one form."""
        field = self.model.model_fields.get(section)
        sections = _section_types(field.annotation) if field else []
        return {kind.model_fields["type"].default: kind for kind in sections} if len(sections) > 1 else {}

    def _suggestion(self, location: list[str]) -> str:
        section = location[0] if len(location) > 1 else ""
        known = [key for key, *_ in self.describe() if key.startswith(section)]
        names = known if section else sorted({key.split(".")[0] for key in known})
        close = difflib.get_close_matches(".".join(location), names, n=1)
        if close:
            return f"; did you mean {close[0]}?"
        return f"; known are {', '.join(dict.fromkeys(names))}"


RECIPE = FileKind(
    Recipe,
    "recipe",
    RecipeError,
    paths=(("model", "path"), ("run", "directory"), ("reference", "path"), ("weights", "directory")),
    of_the_type=frozenset({"task"}),
)
SCENARIO = FileKind(Scenario, "scenario", ScenarioError, paths=(("lengths", "directory"), ("lengths", "file")))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Raises: RecipeError, one line: which key and what would work.
    """
    return RECIPE.load(path, overrides)


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """As `load_recipe`. Raises: ScenarioError."""
    return SCENARIO.load(path, overrides)


def dump_toml(document: Section) -> str:
    """A resolved recipe or scenario as TOML; loading it gives the same one."""
    lines: list[str] = []
    for section, values in document.model_dump(mode="json", exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def describe_recipe() -> list[tuple[str, str, str, str]]:
    """(key, type, default, description) of every recipe key."""
    return RECIPE.describe()


def describe_scenario() -> list[tuple[str, str, str, str]]:
    """(key, type, default, description) of every scenario key."""
    return SCENARIO.describe()


def _section_types(annotation: Any) -> list[type[Section]]:
    """The sections that a field may hold: itself, or those of a union, which may be optional."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Section) else []
    return [kind for part in get_args(annotation) for kind in _section_types(part)]


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
