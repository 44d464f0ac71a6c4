"""JSON that follows a schema, by the library jsonschema."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any

from midflight.errors import MissingExtraError, RecipeError
from midflight.types import Problem

_MAX_CACHED = 256  # schemas of rows
_FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class JsonSchema:
    """Reward 1 if the response is JSON that follows the schema, else 0.

    The JSON is the last block between lines of three backticks, or else the whole response. The schema is `schema`, or
    each row has its own in the column `column`, as a table or as text.
    """

    def __init__(self, *, schema: dict[str, Any] | None = None, column: str | None = None) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise MissingExtraError("jsonschema", "tasks")
        if (schema is None) == (column is None):
            raise RecipeError("task.rewards: json_schema needs schema or column, and not both")
        self._column, self._schema = column, json.dumps(schema)
        if schema is not None:
            try:
                _validator(self._schema)
            except ValueError as error:
                raise RecipeError(f"task.rewards: json_schema: {error}") from error

    def __call__(self, problem: Problem, response: str) -> float:
        validator = _validator(self._schema if self._column is None else _text(problem.columns[self._column]))
        fenced = _FENCED.findall(response)
        try:
            return float(validator.is_valid(json.loads(fenced[-1] if fenced else response, parse_constant=_refuse)))
        except (ValueError, RecursionError):
            return 0.0


@functools.lru_cache(maxsize=_MAX_CACHED)
def _validator(schema: str) -> Any:
    """Return the validator of a schema, given as JSON. Raises: ValueError if it is not a schema."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    parsed = json.loads(schema)
    validator = validator_for(parsed)
    try:
        validator.check_schema(parsed)
    except SchemaError as error:
        raise ValueError(f"the schema is not a JSON schema: {error.message}") from error
    return validator(parsed)


def _text(schema: Mapping[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
