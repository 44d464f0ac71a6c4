"""Unit tests of generated Python code, run in a sandbox.

The tests of a problem have one of these forms, as JSON text or as a column of this type:

    assert f(1) == 2 ...                                     statements; each `assert` is a test
    ["assert f(1) == 2", ...]                                a list of tests
    {"inputs": ["3\\n", ...], "outputs": ["4\\n", ...]}       a program: its standard input and output
    [{"input": "3\\n", "output": "4\\n"}, ...]                the same, pair by pair
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midflight.envs.sandbox.sandbox import Execution, Sandbox, Statement, protections, unprotected
from midflight.errors import RecipeError
from midflight.types import Grade, Problem

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OPEN_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python|python3|py)[ \t]*\n(.*)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_OUTPUT_SLACK = 4096  # bytes read beyond the expected output
_FORMS = 'these would work: statements with assert, a list of them, {"inputs": [...], "outputs": [...]}'


class Code:
    """Reward 1 if the response's code passes all tests of the problem, else 0; the share passed with `partial_credit`.

    The code is the last Python block of the response, or the whole response if there is no block. `tests` names the
    column with the tests; by default, they are the right answer. `timeout_s` is for all tests of one response together,
    and must be shorter than `task.grading_timeout_s`. `packages` are installed packages that the code may import; each
    is imported once, in advance. Code that misbehaves is wrong, not an error: its test fails, and the components
    `timed_out` and `crashed` count it.
    Raises: RecipeError if an option is wrong, or this machine cannot keep the code from files, network and processes
    and `allow_unprotected` is false.
    """

    def __init__(
        self,
        *,
        tests: str | None = None,
        partial_credit: bool = False,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        packages: Sequence[str] = (),
        allow_unprotected: bool = False,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("memory_mb", memory_mb)):
            if value <= 0:
                raise RecipeError(f"task.rewards: code: {name} = {value} is not positive; leave it out for the default")
        if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
            raise RecipeError(f"task.rewards: code: packages: {missing[0]} is not installed; pip install {missing[0]}")
        if not allow_unprotected and (names := unprotected(protections())):
            raise RecipeError(
                f"task.rewards: code: this machine cannot keep generated code from its {', '.join(names)};"
                " Linux with user namespaces or Landlock can, or set allow_unprotected = true"
            )
        self._column, self._partial_credit, self._timeout_s = tests, partial_credit, timeout_s
        self._sandbox = Sandbox(timeout_s=timeout_s, memory_mb=memory_mb, packages=packages)

    def check(self, problem: Problem) -> None:
        """Check that the problem has tests in one of the forms. Raises: RecipeError."""
        try:
            self._tests(problem)
        except ValueError as error:
            raise RecipeError(f"task.rewards: code, problem {problem.problem_id!r}: {error}") from error

    def __call__(self, problem: Problem, response: str) -> Grade:
        tests, code = self._tests(problem), code_of(response)
        if tests.statements:
            execution = self._sandbox.run(code, tests.statements)
            num_tests = sum(statement.counts for statement in tests.statements)
            return self._grade(sum(execution.passed) / num_tests, execution)
        num_passed = 0
        deadline_s = time.monotonic() + self._timeout_s
        for stdin, expected in tests.programs:
            left_s = max(0.0, deadline_s - time.monotonic())
            max_output = 2 * len(expected.encode()) + _OUTPUT_SLACK
            execution = self._sandbox.run(code, stdin=stdin, timeout_s=left_s, max_output=max_output)
            passed = execution.exit_code == 0 and _lines(execution.stdout) == _lines(expected)
            num_passed += passed
            if execution.exit_code is None or not (passed or self._partial_credit):
                break
        return self._grade(num_passed / len(tests.programs), execution)

    def _tests(self, problem: Problem) -> UnitTests:
        if self._column is None:
            return parsed_tests(problem.answer)
        if self._column not in problem.columns:
            columns = ", ".join(problem.columns) or "none"
            raise ValueError(f"there is no column {self._column!r} with tests; columns are {columns}")
        return parsed_tests(problem.columns[self._column])

    def _grade(self, share: float, execution: Execution) -> Grade:
        reward = share if self._partial_credit else float(share == 1)
        timed_out, crashed = execution.exit_code is None, execution.exit_code not in (None, 0)
        return Grade(reward, {"passed": share, "timed_out": float(timed_out), "crashed": float(crashed)})


@dataclass(frozen=True, slots=True)
class UnitTests:
    """Tests of one problem: statements to run after the code, or inputs and outputs of the code as a program."""

    statements: tuple[Statement, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()


def parsed_tests(tests: Any) -> UnitTests:
    """Return the tests in any of the forms. Raises: ValueError if there are none or they have another form."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            return UnitTests(_statements(tests))
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys() and "fn_name" not in tests:
        tests = [{"input": a, "output": b} for a, b in zip(tests["inputs"], tests["outputs"], strict=True)]
    if isinstance(tests, list) and tests:
        if all(isinstance(test, str) for test in tests):
            return UnitTests(tuple(Statement(_checked(test)) for test in tests))
        if all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            return UnitTests(programs=tuple((_text(test["input"]), _text(test["output"])) for test in tests))
    raise ValueError(f"the tests are {str(tests)[:60]!r}; {_FORMS}")


def code_of(response: str) -> str:
    """Return the last block marked as Python, else the last unmarked block, else the whole response."""
    blocks = [(language.lower(), textwrap.dedent(code)) for language, code in _FENCE.findall(response)]
    for languages in (_PYTHON, ("",)):
        codes = [code for language, code in blocks if language in languages]
        if codes:
            return codes[-1]
    unclosed = _OPEN_FENCE.search(response)
    return textwrap.dedent(unclosed[1]) if unclosed else response


def _statements(source: str) -> tuple[Statement, ...]:
    """Split the source: each `assert` at the top level is a test; without any, the whole source is one test."""
    body = ast.parse(_checked(source)).body
    if not body:
        raise ValueError(f"there are no tests; {_FORMS}")
    if not any(isinstance(node, ast.Assert) for node in body):
        return (Statement(source),)
    return tuple(Statement(ast.unparse(node), isinstance(node, ast.Assert)) for node in body)


def _checked(source: str) -> str:
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"the tests are not Python, line {error.lineno}: {error.msg}; {_FORMS}") from error
    return source


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
