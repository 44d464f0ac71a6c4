"""A row becomes a Problem: the columns of the prompt, the answer, the difficulty and the category.

A dot in a column's name reaches into objects and lists: `reward_model.ground_truth`, `conversations.0.value`.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from midflight.config.tasks import DatasetSource
from midflight.envs.patterns import compiled, last_answer
from midflight.errors import RecipeError
from midflight.types import Message, Problem, Text


class _ColumnFormatter(string.Formatter):
    """Formatter whose fields are whole names of columns, with their dots."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return kwargs[field_name], field_name


_FORMATTER = _ColumnFormatter()
_PLAIN_TYPES = (str, bool, int, float, bytes, type(None))


class RowReader:
    """Reader of the rows of a dataset.

    Raises: RecipeError if the template or the pattern is wrong.
    """

    def __init__(self, source: DatasetSource, key: str) -> None:
        self._source, self._key = source, key
        self._template_columns = self._parse_template()
        self._pattern = self._answer_pattern()

    @property
    def columns(self) -> dict[str, str]:
        """Columns that a problem is made from, with the key that names each."""
        source = self._source
        named = {"answer": source.answer, "difficulty": source.difficulty, "category": source.category}
        columns = dict.fromkeys(self._template_columns, f"prompt_template = {source.prompt_template!r}")
        if source.prompt_template is None:
            columns[source.prompt] = f"prompt = {source.prompt!r}"
        return {column: f"{key} = {column!r}" for key, column in named.items() if column} | columns

    def problem(self, row: Mapping[str, Any], place: str) -> Problem:
        """Return the problem of a row; its id is `place`. Raises: RecipeError that names the key and the place."""
        source = self._source
        own = None if source.prompt_template is not None else source.prompt
        return Problem(
            place,
            self._prompt(row, place),
            self._answer(row, place),
            self._difficulty(row, place),
            _text_of(self._value("category", source.category, row, place)) if source.category else "",
            columns={name: plain(value) for name, value in row.items() if name != own},
        )

    def _parse_template(self) -> list[str]:
        template = self._source.prompt_template
        if template is None:
            return []
        place = f"{self._key}.prompt_template = {template!r}"
        try:
            columns = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise RecipeError(f"{place}: {error}; write {{{{ and }}}} for braces that are text") from error
        if "" in columns:
            raise RecipeError(f"{place} has braces without a column; write {{{{ and }}}} for braces that are text")
        if not columns:
            raise RecipeError(
                f"{place} names no column, so every prompt would be the same; {{question}} would name one"
            )
        return list(dict.fromkeys(columns))

    def _answer_pattern(self) -> re.Pattern[str] | None:
        pattern = self._source.answer_pattern
        if pattern is None:
            return None
        return compiled(f"{self._key}.answer_pattern", pattern, re.DOTALL, group_holds="the answer")

    def _prompt(self, row: Mapping[str, Any], place: str) -> Text:
        source = self._source
        if source.prompt_template is None:
            value, key = self._value("prompt", source.prompt, row, place), f"{self._key}.prompt = {source.prompt!r}"
            if isinstance(value, Sequence) and not isinstance(value, str):
                return [_message(item, f"{key}: {place}") for item in value]
            if not isinstance(value, str) or not value:
                kind = "empty" if value in (None, "") else f"a {type(value).__name__}"
                raise RecipeError(f"{key}: {place} is {kind}, neither text nor a list of messages")
        else:
            value = self._rendered(source.prompt_template, row, place)
        return [{"role": "user", "content": value}] if source.chat else value

    def _rendered(self, template: str, row: Mapping[str, Any], place: str) -> str:
        values = {column: self._value("prompt_template", column, row, place) for column in self._template_columns}
        if empty := [column for column, value in values.items() if value is None]:
            raise RecipeError(f"{self._key}.prompt_template: {place} has no value in the column {empty[0]!r}")
        try:
            return _FORMATTER.vformat(template, (), values)
        except Exception as error:
            raise RecipeError(f"{self._key}.prompt_template = {template!r} fails in {place}: {error}") from error

    def _answer(self, row: Mapping[str, Any], place: str) -> str:
        if not self._source.answer:
            return ""
        text = _text_of(self._value("answer", self._source.answer, row, place))
        if self._pattern is None:
            return text
        answer = last_answer(self._pattern, text)
        if answer is None:
            raise RecipeError(
                f"{self._key}.answer_pattern = {self._pattern.pattern!r} finds no answer in {place}: {text!r:.100}"
            )
        return answer.strip()

    def _value(self, key: str, column: str, row: Mapping[str, Any], place: str) -> Any:
        try:
            return value_at(row, column)
        except (LookupError, TypeError, ValueError) as error:
            raise RecipeError(
                f"{self._key}.{key}: {place} has no {column!r}; the column is {_short(row, column)}"
            ) from error

    def _difficulty(self, row: Mapping[str, Any], place: str) -> int:
        if self._source.difficulty is None:
            return 0
        value = self._value("difficulty", self._source.difficulty, row, place)
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or (isinstance(value, float) and number != value):
            raise RecipeError(
                f"{self._key}.difficulty = {self._source.difficulty!r}: {place} has {value!r:.60}, not an integer; as"
                " category, the column would work"
            )
        return number


def check_columns(columns: Mapping[str, str], known: Sequence[str], key: str, place: str) -> None:
    """Check that every column exists; the values say which key names it. Raises: RecipeError."""
    for column, named_by in columns.items():
        if top_column(column, known) not in known:
            close = difflib.get_close_matches(column, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            optional = "; answer = '' if the rewards need none" if named_by == "answer = 'answer'" and not hint else ""
            raise RecipeError(
                f"{key}.{named_by}: {place} has no column {column!r}; it has {', '.join(known)}{hint}{optional}"
            )


def top_column(column: str, known: Sequence[str]) -> str:
    """Column of the dataset that holds `column`, which may reach into it."""
    return column if column in known else column.partition(".")[0]


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Value of a column, or of a place in it. Raises: LookupError, TypeError or ValueError if it has no such place."""
    if column in row:
        return row[column]
    head, *parts = column.split(".")
    value = row[head]
    for part in parts:
        value = value[part] if isinstance(value, Mapping) else value[int(part)]
    return value


def plain(value: Any) -> Any:
    """Value that msgpack can write: dates, times and decimals become text."""
    if isinstance(value, _PLAIN_TYPES):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def _short(row: Mapping[str, Any], column: str) -> str:
    return f"{row[column.partition('.')[0]]!r:.100}"


def _text_of(value: Any) -> str:
    """Text of an answer or a category; lists and objects become JSON."""
    value = plain(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def _message(item: Any, place: str) -> Message:
    """Message of a list, without fields that are empty. Raises: RecipeError."""
    fields = {name: value for name, value in item.items() if value is not None} if isinstance(item, Mapping) else {}
    if not ({"role", "content"} <= fields.keys() and all(isinstance(value, str) for value in fields.values())):
        raise RecipeError(f"{place} has a message {item!r:.100}, not an object with role and content as text")
    return fields
