"""Built-in rewards except `math`: answers found, values at the limits, and options that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from midflight.config.tasks import RewardTerm
from midflight.envs.rewards.terms import RewardError
from midflight.errors import RecipeError
from midflight.launch.rewards import build_rewards
from midflight.types import Grade, Problem

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
GERMAN = "Der Zug fährt um acht Uhr morgens von Gleis drei ab und kommt gegen Mittag an."
ENGLISH = "The train leaves at eight in the morning from platform three and arrives at noon."


def graded(name: str, response: str, answer: str = "", **options: Any) -> Grade:
    return build_rewards([RewardTerm(type=name, options=options)]).grade(Problem("0", ENGLISH, answer), response)


def reward(name: str, response: str, answer: str = "", **options: Any) -> float:
    return graded(name, response, answer, **options).reward


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        (" two  words\n", {}, 1.0),
        ("Two words", {}, 0.0),
        ("Two words", {"ignore_case": True}, 1.0),
        ("first: one\nlast: two words", {"pattern": r"\w+: (.*)"}, 1.0),
        ("last: two words\nfirst: one", {"pattern": r"\w+: (.*)"}, 0.0),
        ("two words", {"pattern": "Answer: (.*)"}, 0.0),
    ],
)
def test_exact_compares_text(response: str, options: dict[str, Any], expected: float) -> None:
    assert reward("exact", response, "two words", **options) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("48 / 2 = 24, so 72.", "72", 1.0),
        ("72 + 1", "72", 0.0),
        ("about 1,234.50 dollars", "1234.5", 1.0),
        ("1,2,3", "3", 1.0),
        ("x = -5", "-5", 1.0),
        ("7-5", "5", 1.0),
        ("\u22125", "-5", 1.0),
        ("6.02e23", "602000000000000000000000", 1.0),
        ("it is .5", "1/2", 1.0),
        ("it is 3/2", "1/2", 0.0),
        ("1/0", "1", 0.0),
        ("0.3333333", "1/3", 1.0),
        ("0.3333", "1/3", 0.0),
        ("none", "0", 0.0),
        ("#### 72", "48 + 24 = 72\n#### 72", 1.0),
    ],
)
def test_numeric_compares_the_last_number(response: str, answer: str, expected: float) -> None:
    assert reward("numeric", response, answer) == expected


def test_numeric_tolerances_and_pattern() -> None:
    assert reward("numeric", "0.3333", "1/3", relative=1e-3) == 1.0
    assert reward("numeric", "10.5", "10", absolute=0.5) == 1.0
    assert reward("numeric", "10.6", "10", absolute=0.5) == 0.0
    assert reward("numeric", "#### 7\nand 8", "7", pattern="#### (.*)") == 1.0
    assert reward("numeric", "7", "7", pattern="#### (.*)") == 0.0
    assert graded("numeric", "1,000.0", "7").answer == "1000"


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(b) or (C), so (C)", "C"),
        (r"A or B? \boxed{B}, not (C)", "B"),
        (r"\boxed{\text{(d)}}", "D"),
        ("The answer is **C**.", "C"),
        ("Answer: (A)\nI am sure about B", "A"),
        ("the correct answer is option B", "B"),
        ("A train leaves. I think\nC.", "C"),
        ("A train leaves, I think D", "D"),
        ("A train leaves, I think", None),
        ("", None),
    ],
)
def test_multiple_choice_finds_the_letter(response: str, letter: str | None) -> None:
    grade = graded("multiple_choice", response, "(C) Paris", letters="ABCD")
    assert grade.answer == letter
    assert grade.reward == float(letter == "C")


def test_regex_matches_the_whole_response() -> None:
    assert reward("regex", "a\nb", pattern="a.b") == 1.0
    assert reward("regex", "a\nb.", pattern="a.b") == 0.0
    assert reward("regex", "A\nB.", pattern="a.b", search=True) == 0.0
    assert reward("regex", "A\nB.", pattern="a.b", search=True, ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>\nhm\n</think>\n4", 1.0),
        (" <think>hm</think>4", 1.0),
        ("<think></think>4", 0.0),
        ("<think>hm</think>", 0.0),
        ("so <think>hm</think>4", 0.0),
        ("<think>hm</think>4<think>", 0.0),
        ("<think>hm<think></think>4", 0.0),
        ("hm</think>4", 0.0),
        ("4", 0.0),
    ],
)
def test_think_format(response: str, expected: float) -> None:
    assert reward("think_format", response) == expected


def test_think_format_after_an_opened_thought() -> None:
    assert reward("think_format", "hm</think>4", opened_by_prompt=True) == 1.0
    assert reward("think_format", "<think>hm</think>4", opened_by_prompt=True) == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"age": 3}', 1.0),
        ('{"age": "3"}', 0.0),
        ('Here:\n```json\n{"age": 3}\n```\nDone.', 1.0),
        ('```\n{"age": 3}\n```\nor\n```json\n{}\n```', 0.0),
        ('Here: {"age": 3}', 0.0),
        ('{"age": 3, "weight": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(response: str, expected: float) -> None:
    assert reward("json_schema", response, schema=PERSON) == expected


def test_each_row_may_have_its_own_schema() -> None:
    rewards = build_rewards([RewardTerm(type="json_schema", options={"column": "format"})])
    for schema in (PERSON, '{"type": "object", "required": ["age"]}'):
        problem = Problem("0", "", columns={"format": schema})
        assert rewards.grade(problem, '{"age": 1}').reward == 1.0
        assert rewards.grade(problem, "{}").reward == 0.0
    with pytest.raises(RewardError, match="json_schema, problem '7': ValueError: the schema is not a JSON schema: "):
        rewards.grade(Problem("7", "", columns={"format": {"type": 5}}), "{}")


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        (ENGLISH, {}, 1.0),
        (GERMAN, {}, 0.0),
        (GERMAN, {"language": "de"}, 1.0),
        (GERMAN, {"language": "de", "languages": ["de", "en"]}, 1.0),
        ("Ja.", {}, 1.0),
        ("Ja, genau.", {"min_letters": 5, "languages": ["de", "en"]}, 0.0),
        (f"{ENGLISH}\n```\nzug = fahren(acht, uhr, morgens, von, gleis)\n```", {}, 1.0),
        (r"$\text{der Zug von Gleis drei und vier}$ \[ x \] 4", {}, 1.0),
    ],
)
def test_language_of_response_and_prompt(response: str, options: dict[str, Any], expected: float) -> None:
    assert reward("language", response, **options) == expected


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (5000, -1.0)])
def test_soft_length_descends_before_the_limit(length: int, expected: float) -> None:
    assert reward("soft_length", "x" * length, limit=100, buffer=20) == expected
    assert reward("soft_length", "word " * length, limit=100, buffer=20, unit="words") == expected


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("exact", {"pattern": "("}, "exact: pattern = '(' is not a regular expression"),
        ("numeric", {"relative": -1.0}, "must not be negative"),
        ("multiple_choice", {"letters": "a-d"}, "letters = 'a-d'; capitals such as"),
        ("regex", {}, "regex(*, pattern: "),
        ("regex", {"pattern": "x", "whole": True}, "got an unexpected keyword argument 'whole'"),
        ("json_schema", {}, "needs schema or column, and not both"),
        ("json_schema", {"schema": {"type": "person"}}, "the schema is not a JSON schema: 'person' is not valid"),
        ("language", {"language": "english"}, "there is no 'english'; known are ace, af, "),
        ("language", {"language": "fr", "languages": ["de", "en"]}, "language = 'fr' is not one of languages"),
        ("soft_length", {"limit": 10, "buffer": 20}, "buffer = 20 is out of range; 1 to limit = 10 would work"),
        ("soft_length", {"limit": 10, "buffer": 2, "unit": "tokens"}, "'characters' or 'words' would work"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as raised:
        build_rewards([RewardTerm(type=name, options=options)])
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "answer"), [("numeric", "many"), ("multiple_choice", "Paris"), ("math", "")])
def test_right_answer_of_the_wrong_kind_names_the_row(name: str, answer: str) -> None:
    with pytest.raises(RewardError, match=f"{name}, problem '0': ValueError: the right answer '{answer}'"):
        reward(name, r"\boxed{B} or 5", answer)
