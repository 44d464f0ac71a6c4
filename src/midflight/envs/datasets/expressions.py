"""The expression of `where`: true or false for a row, evaluated by the library simpleeval, which runs no other code."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from midflight.errors import MissingExtraError, RecipeError

_FUNCTIONS = {function.__name__: function for function in (abs, all, any, bool, float, int, len, max, min, round, str)}
_CONSTANTS = {"True": True, "False": False, "None": None}


class RowExpression:
    """A Python expression of column names, such as `level <= 3 and source != "aime"`.

    Strings have their methods; the functions are abs, all, any, bool, float, int, len, max, min, round and str.
    Raises: RecipeError if the text is not an expression; MissingExtraError without simpleeval.
    """

    def __init__(self, text: str, key: str) -> None:
        try:
            import simpleeval
        except ImportError as error:
            raise MissingExtraError("simpleeval", "tasks") from error
        self._text, self._key = text, key
        self._evaluator = simpleeval.EvalWithCompoundTypes(functions=_FUNCTIONS)
        try:
            self._tree = self._evaluator.parse(text.strip())
        except (SyntaxError, simpleeval.InvalidExpression) as error:
            raise RecipeError(f"{key} = {text!r} is not an expression: {_first_line(error)}") from error
        nodes = list(ast.walk(self._tree))
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        names = [node for node in nodes if isinstance(node, ast.Name) and node not in called]
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | _CONSTANTS.keys()
        self.columns = list(dict.fromkeys(node.id for node in names if node.id not in bound))

    def is_true(self, row: Mapping[str, Any], place: str) -> bool:
        """Return the value for a row. Raises: RecipeError, naming `place`, if the expression fails or gives no bool."""
        self._evaluator.names = {**_CONSTANTS, **{name: row[name] for name in self.columns}}
        try:
            value = self._evaluator.eval(self._text, previously_parsed=self._tree)
        except Exception as error:
            used = ", ".join(f"{name} = {row[name]!r:.60}" for name in self.columns)
            raise RecipeError(
                f"{self._key} = {self._text!r} fails in {place} with {used}: {_first_line(error)}"
            ) from error
        if not isinstance(value, bool):
            raise RecipeError(f"{self._key} = {self._text!r} is {value!r:.60} in {place}, neither true nor false")
        return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
