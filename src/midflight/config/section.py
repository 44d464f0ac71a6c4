"""The base of every section: frozen, without unknown keys. In a union of sections, the key `type` chooses one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

# The name, in messages, of the section that an import path chooses.
OWN_TYPE = "package.module:name"


def _check_import_path(path: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", path):
        raise ValueError(f"should be {OWN_TYPE}")
    return path


ImportPath = Annotated[str, AfterValidator(_check_import_path)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class OwnSection(Section):
    """The member of a union for the user's own implementation."""

    type: ImportPath
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of your own implementation")


@dataclass(frozen=True, slots=True)
class ByType:
    """Annotation of a union of sections: `type` names the member; the first member is the default."""

    keeps: bool = False  # if the command line changes the type, keep the keys that both members have

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        members = members_of(source)
        default: str = sections_of(source)[0].model_fields["type"].default
        choices = {name: handler.generate_schema(member) for name, member in members.items()}

        def chosen(value: Any) -> str:
            name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            if name is None:
                return default
            return OWN_TYPE if OWN_TYPE in members and ":" in str(name) else str(name)

        return core_schema.tagged_union_schema(choices, chosen)


def sections_of(annotation: Any) -> list[type[Section]]:
    """Return the sections that a field may hold: one section, or the members of a union."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Section) else []
    return [section for part in get_args(annotation) for section in sections_of(part)]


def members_of(annotation: Any) -> dict[str, type[Section]]:
    """Return the members of a union of sections by type; empty if there is only one section."""
    sections = sections_of(annotation)
    return {name: section for section in sections for name in types_of(section)} if len(sections) > 1 else {}


def types_of(section: type[Section]) -> tuple[str, ...]:
    """Return the values of `type` that choose this member of a union."""
    return get_args(section.model_fields["type"].annotation) or (OWN_TYPE,)
