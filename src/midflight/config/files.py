"""Recipes and scenarios as TOML files with command-line overrides; every error is one line."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

import pydantic

from midflight.config.recipe import Recipe
from midflight.config.scenario import Scenario
from midflight.config.section import OWN_TYPE, ByType, Section, members_of, sections_of
from midflight.errors import MidflightError, RecipeError, ScenarioError

Document = TypeVar("Document", bound=Section)

SHIPPED_RECIPES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "recipes").rglob("*.toml"))}


@dataclass(frozen=True, slots=True)
class FileKind(Generic[Document]):
    """A kind of TOML file: its model, and the words for its messages."""

    model: type[Document]
    noun: str
    error: type[MidflightError]
    moved: Mapping[str, str] = field(default_factory=dict)  # key in an earlier version -> key now
    shipped: Mapping[str, Path] = field(default_factory=dict)  # name -> file in the package
    directory_key: str = ""  # key that gets the directory of a file, unless the file ships with midflight

    def load(self, path: Path, overrides: Sequence[str] = ()) -> Document:
        """Read, override and validate a file, or the shipped file with this name.

        Raises: `error`, whose one line names the key and values that would work.
        """
        if not path.exists():
            path = self.shipped.get(str(path), path)
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            names = f"; these ship with midflight: {', '.join(self.shipped)}" if self.shipped else ""
            raise self.error(f"cannot read the {self.noun} {path}: {error.strerror}{names}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise self.error(f"{path} is not valid TOML: {error}") from error
        directory = path.resolve().parent
        if self.directory_key and path not in self.shipped.values():
            section, _, key = self.directory_key.partition(".")
            if isinstance(table := values.setdefault(section, {}), dict):
                table.setdefault(key, str(directory))
        return self.build(_anchored(values, self.model, directory), overrides)

    def build(self, values: dict[str, Any], overrides: Sequence[str] = ()) -> Document:
        """Override and validate values. Raises: `error`, as `load`."""
        for override in sorted(overrides, key=self._comes_later):
            self._apply_override(values, override)
        self._check_moved(values)
        try:
            return self.model.model_validate(values)
        except pydantic.ValidationError as error:
            raise self.error(self._one_line(error)) from error

    def describe(self) -> list[tuple[str, str, str, str]]:
        """Return (key, type, default, description) of every key.

        If only some types of a section have the key, the description names these types. The keys of the sections in a
        list follow the list, as in `eval.sets[].name`.
        """
        rows: dict[tuple[str, str, str, str], list[str]] = {}
        for name, section_field in self.model.model_fields.items():
            members = members_of(section_field.annotation) or {"": sections_of(section_field.annotation)[0]}
            for type_name, section in members.items():
                for row in _rows_of(name, section):
                    rows.setdefault(row, []).append(type_name)
        return [(*row[:3], row[3] + self._owners(row[0], types)) for row, types in rows.items()]

    def _owners(self, key: str, types: Sequence[str]) -> str:
        section, _, name = key.partition(".")
        return "" if name == "type" or len(types) >= len(self._members(section)) else f" (of {', '.join(types)})"

    def _comes_later(self, override: str) -> bool:
        """True if the override must be applied after the overrides that choose the type of its section."""
        section, _, name = override.partition("=")[0].strip().partition(".")
        return not (name == "type" and self._keeps(section))

    def _apply_override(self, values: dict[str, Any], override: str) -> None:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) < 2:
            raise self.error(f"override {override!r} does not have the form section.key=value")
        if parts[1:] and parts[-1] in self._secrets(parts[0]):
            raise self.error(
                f"{key.strip()} on the command line can be read by every user of this machine; set it in the"
                f" {self.noun} or in the environment (MIDFLIGHT_{parts[-1].upper()})"
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # an unquoted word is a string
        override_values: dict[str, Any] = {parts[-1]: value}
        for part in reversed(parts[:-1]):
            override_values = {part: override_values}
        override_values = _anchored(override_values, self.model, Path.cwd())
        if parts[1:] == ["type"] and isinstance(values.get(parts[0]), dict):
            self._change_type(values[parts[0]], parts[0], value)
        self._merge(values, override_values, key)

    def _change_type(self, table: dict[str, Any], section: str, new_type: object) -> None:
        """Remove the keys of the old type of a section, if the new type differs."""
        members = self._members(section)
        if table.get("type", self._default_type(section)) == new_type:
            return
        if not self._keeps(section):
            table.clear()
        table.pop("options", None)
        new = members.get(str(new_type), members.get(OWN_TYPE))
        for key in {key for member in members.values() for key in member.model_fields}.intersection(table):
            if new and key not in new.model_fields:
                del table[key]

    def _check_moved(self, values: dict[str, Any]) -> None:
        for old, new in self.moved.items():
            section, _, key = old.partition(".")
            if isinstance(values.get(section), dict) and key in values[section]:
                raise self.error(f"{old} is now {new}")

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
        key, section, chosen, members = self._locate([str(part) for part in first["loc"]])
        name = key.rpartition(".")[2]
        if first["type"] == "extra_forbidden":
            owners = [owner for owner, member in members.items() if name in member.model_fields]
            if chosen and owners:
                return f"{key} is a key of {' and '.join(owners)}, but {section}.type = {chosen!r}"
            return f"unknown key {key}{self._suggestion(key)}"
        if first["type"] == "union_tag_invalid":
            return f"{key}.type: there is no {first['ctx']['tag']!r}; known are {', '.join(members)}"
        if first["type"] == "missing":
            return f"{key} is missing"
        message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
        got = "" if isinstance(first["input"], dict) or not key else f", got {first['input']!r}"
        return f"{key}: {message}{got}" if key else message

    def _locate(self, location: Sequence[str]) -> tuple[str, str, str, dict[str, type[Section]]]:
        """Return the key at a place in the document, and about the innermost section with a choice: key, type, members.

        Pydantic's locations have the chosen type of a section after its key.
        """
        key: list[str] = []
        section, chosen = "", ""
        members: dict[str, type[Section]] = {}
        sections: list[type[Section]] = [self.model]
        for part in location:
            if chosen == "" and part in members:
                chosen = part
                sections = [members[part]]
                continue
            key.append(part)
            annotations = [item.model_fields[part].annotation for item in sections if part in item.model_fields]
            if annotations:
                sections = sections_of(annotations[0])
            if new_members := members_of(annotations[0]) if annotations else {}:
                section, chosen, members = ".".join(key), "", new_members
        return ".".join(key), section, chosen, members

    def _members(self, section: str) -> dict[str, type[Section]]:
        """The sections that its `type` chooses from; none if it has only one form."""
        info = self.model.model_fields.get(section)
        return members_of(info.annotation) if info else {}

    def _secrets(self, section: str) -> set[str]:
        """The keys of a section whose values are secret."""
        info = self.model.model_fields.get(section)
        fields = [field for kind in sections_of(info.annotation) for field in kind.model_fields.items()] if info else []
        return {key for key, field_info in fields if pydantic.SecretStr in get_args(field_info.annotation)}

    def _default_type(self, section: str) -> object:
        info = self.model.model_fields.get(section)
        fields = sections_of(info.annotation)[0].model_fields if info else {}
        return fields["type"].default if "type" in fields else None

    def _keeps(self, section: str) -> bool:
        """True if a section keeps the keys that its old and its new type share."""
        info = self.model.model_fields.get(section)
        return info is not None and (ByType(keeps=True) in info.metadata or not self._members(section))

    def _suggestion(self, key: str) -> str:
        section = key.partition(".")[0] if "." in key else ""
        known = [name for name, *_ in self.describe() if name.startswith(section)]
        names = known if section else sorted({name.partition(".")[0] for name in known})
        close = difflib.get_close_matches(key, names, n=1)
        return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(dict.fromkeys(names))}"


RECIPE = FileKind(
    Recipe,
    "recipe",
    RecipeError,
    moved={
        "trainer.backend": "trainer.type",
        "loss.function": "loss.type",
        "schedule.max_waiting": "schedule.queue_capacity",
        "engine.update_timeout_s": "weights.timeout_s",
        "preprocess.process": "preprocess.num_workers: 0 for 'rollout', 1 or more for 'own'",
        "engine.max_update_pause_s": "not needed: engines copy new weights while they decode; remove the key",
    },  # since version 0.1
    shipped=SHIPPED_RECIPES,
    directory_key="run.recipe_directory",
)
SCENARIO = FileKind(Scenario, "scenario", ScenarioError)


load_recipe, load_scenario = RECIPE.load, SCENARIO.load


def model_recipe(directory: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a model directory: every other key has its default or the value of an override."""
    return RECIPE.build({"model": {"path": str(directory.resolve())}}, overrides)


describe_recipe, describe_scenario = RECIPE.describe, SCENARIO.describe


def dump_toml(document: Section) -> str:
    """Return a resolved recipe or scenario as TOML; loading the text gives an equal document."""
    lines: list[str] = []
    for section, values in document.model_dump(mode="json", exclude_none=True).items():
        keys = sorted(values, key=lambda key: key != "type")  # the type first, since the other keys depend on it
        lines += [f"[{section}]", *(f"{key} = {_toml_value(values[key])}" for key in keys), ""]
    return "\n".join(lines)


def _anchored(value: Any, annotation: Any, directory: Path) -> Any:
    """Return a value of a document with all relative paths below `directory`; the annotation says what is a path."""
    if isinstance(value, str) and Path in (annotation, *get_args(annotation)):
        return str((directory / Path(value).expanduser()).resolve())
    if isinstance(value, list):
        return [_anchored(item, annotation, directory) for item in value]
    if isinstance(value, dict):
        sections = sections_of(annotation)
        fields = {key: info.annotation for section in sections for key, info in section.model_fields.items()}
        return {key: _anchored(item, fields.get(key), directory) for key, item in value.items()}
    return value


def _rows_of(name: str, section: type[Section]) -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, description) of the keys of a section, and of the sections in its lists."""
    for key, info in section.model_fields.items():
        default = "required" if info.is_required() else _toml_value(info.get_default(call_default_factory=True))
        description = info.description or (key == "type" and section.__doc__) or ""
        nested = sections_of(info.annotation)
        in_list = get_origin(info.annotation) is tuple and len(nested) == 1
        kind = "list of tables" if in_list else "table" if nested else _type_name(info.annotation)
        yield f"{name}.{key}", kind, default, description
        if in_list:
            yield from _rows_of(f"{name}.{key}[]", nested[0])


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _toml_value(value: Any) -> str:
    """Return a JSON-like value as TOML; strings, numbers and lists are the same in both."""
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))
