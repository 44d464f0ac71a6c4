"""The reward of generated code: forms of tests, the code in a response, and grades."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midflight.envs.rewards import code as code_module
from midflight.envs.rewards.code import Code, UnitTests, code_of, parsed_tests
from midflight.envs.sandbox.sandbox import Statement
from midflight.errors import RecipeError
from midflight.types import Grade, Problem

DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTIONS = "assert double(2) == 4\nassert double(-1) == -2"
PROGRAMS = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}
PROTECTED = {"files": "yes", "network": "yes", "processes": "yes"}


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nBetter:\n```py\nx = 2\n```\nOutput:\n```\n2\n```", "x = 2\n"),
        ("```\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("1. so\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python\nx = 1\ny =", "x = 1\ny ="),
        ("```Python title=a.py\nx = '```'\n```", "x = '```'\n"),
    ],
)
def test_last_python_block_is_the_code(response: str, code: str) -> None:
    assert code_of(response) == code


@pytest.mark.parametrize(
    ("tests", "parsed"),
    [
        (
            "import math\nassert f(1)\nassert f(2), 'two'",
            UnitTests(
                (Statement("import math", counts=False), Statement("assert f(1)"), Statement("assert f(2), 'two'"))
            ),
        ),
        ("check(f)", UnitTests((Statement("check(f)"),))),
        (["assert f(1)", "x = 1\nassert f(x)"], UnitTests((Statement("assert f(1)"), Statement("x = 1\nassert f(x)")))),
        ('["assert f(1)"]', UnitTests((Statement("assert f(1)"),))),
        ({"inputs": ["1\n", ["2", "3"]], "outputs": ["a", 5]}, UnitTests(programs=(("1\n", "a"), ("2\n3", "5")))),
        ('[{"input": "1", "output": "2", "type": "stdin_stdout"}]', UnitTests(programs=(("1", "2"),))),
    ],
)
def test_tests_have_several_forms(tests: Any, parsed: UnitTests) -> None:
    assert parsed_tests(tests) == parsed


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "assert",
        [],
        {},
        "[]",
        ["assert x =="],
        {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"},
        {"inputs": ["1"]},
        {"inputs": ["1", "2"], "outputs": ["1"]},
        [1],
        None,
    ],
)
def test_other_forms_are_refused(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"tests|argument"):
        parsed_tests(tests)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s = 0 is not positive"),
        ({"memory_mb": -1}, "memory_mb = -1 is not positive"),
        ({"packages": ["no_such_package"]}, "no_such_package is not installed"),
    ],
)
def test_wrong_options_are_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(code_module, "protections", lambda: PROTECTED)
    with pytest.raises(RecipeError, match=message):
        Code(**options)


def test_machine_without_protection_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "protections", lambda: PROTECTED | {"files": "", "network": ""})
    with pytest.raises(RecipeError, match="cannot keep generated code from its files, network"):
        Code()
    Code(allow_unprotected=True)


@pytest.fixture(scope="module")
def reward() -> Code:
    return Code(timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "grade"),
    [
        (f"```python\n{DOUBLE}```", Grade(1.0, {"passed": 1.0, "timed_out": 0.0, "crashed": 0.0})),
        ("def double(x): return 4", Grade(0.0, {"passed": 0.5, "timed_out": 0.0, "crashed": 0.0})),
        ("I cannot do that.", Grade(0.0, {"passed": 0.0, "timed_out": 0.0, "crashed": 1.0})),
        ("import os\nos._exit(0)", Grade(0.0, {"passed": 0.0, "timed_out": 0.0, "crashed": 0.0})),
    ],
)
def test_assertions_grade_a_response(reward: Code, response: str, grade: Grade) -> None:
    assert reward(Problem("0", "", ASSERTIONS), response) == grade


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "partial_credit", "passed"),
    [
        ("print(2 * int(input()))", False, 1.0),
        ("print(2 * int(input()), ' ')\nprint()", False, 1.0),
        ("print(4)", False, 0.0),
        ("print(4)", True, 1 / 3),
        ("print(2 * int(input()))\nraise SystemExit(1)", True, 0.0),
    ],
)
def test_programs_grade_a_response(response: str, partial_credit: bool, passed: float) -> None:
    reward = Code(timeout_s=60, partial_credit=partial_credit, tests="tests")
    for tests in (PROGRAMS, json.dumps(PROGRAMS)):
        grade = reward(Problem("0", "", columns={"tests": tests}), response)
        assert grade.components["passed"] == pytest.approx(passed)
        assert grade.reward == pytest.approx(passed)


@pytest.mark.slow
def test_endless_program_takes_the_time_of_one_response() -> None:
    reward = Code(timeout_s=0.3, partial_credit=True, tests="tests")
    code = "n = int(input())\nwhile n == 2: pass\nprint(2 * n)"
    grade = reward(Problem("0", "", columns={"tests": PROGRAMS}), code)
    assert grade == Grade(1 / 3, {"passed": 1 / 3, "timed_out": 1.0, "crashed": 0.0})


@pytest.mark.slow
def test_missing_column_is_named(reward: Code) -> None:
    with pytest.raises(ValueError, match="no column 'tests' with tests; columns are level"):
        Code(tests="tests")(Problem("0", "", columns={"level": 1}), "x")
