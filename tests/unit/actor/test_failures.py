"""Reasons of failed verifiers: one line with the place in the user's code, and readable counts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from midflight.actor import failures
from midflight.actor.failures import count_failure, reason_of
from midflight.actor.grading import LiveEpisodes
from midflight.envs.chain_sums import ChainSums
from midflight.types import Grade, Problem, RolloutId

PROBLEM = Problem("0", "a1b1:", "2")


class Fragile(ChainSums):
    """Environment whose errors depend on the response."""

    def grade(self, problem: Problem, response: str) -> Grade:
        if response == "ours":
            return super().grade(None, "=")  # type: ignore[arg-type]
        return Grade(json.loads(response))


def failure(response: str) -> str:
    return LiveEpisodes(Fragile()).answer(RolloutId(0), PROBLEM, [response]).failure


def place(line_of: str) -> str:
    """File name and number of the line that begins with `line_of`, as at the end of a reason."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip().startswith(line_of)]
    return f"test_failures.py:{number})"


@pytest.mark.parametrize(
    ("response", "kind", "line"),
    [("{", "JSONDecodeError: ", "return Grade(json"), ("ours", "AttributeError: ", "return super().grade(None")],
)
def test_reason_names_the_last_line_of_the_users_code(response: str, kind: str, line: str) -> None:
    reason = failure(response)
    assert reason.startswith(kind)
    assert reason.endswith(place(line))


def test_long_reason_keeps_its_place() -> None:
    reason = reason_of(_raised(ValueError("x" * 10_000)))
    assert len(reason) == 500
    assert reason.endswith(place("raise error"))


def test_traceback_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(failures, "_logged", set())
    with caplog.at_level(logging.WARNING):
        for response in ("{", "[", "{", "ours", "ours"):
            failure(response)
    assert caplog.text.count("Traceback") == 2
    assert caplog.text.count("in grade\n    return Grade(json.loads(response))") == 1


def test_errors_of_one_type_and_place_are_one_reason() -> None:
    counts: dict[str, int] = {}
    for reason in ("E: a (t.py:3)", "E: b (t.py:3)", "E: a (t.py:4)", "F: a (t.py:3)", "too slow", "too slow"):
        count_failure(counts, reason)
    assert counts == {"E: a (t.py:3)": 2, "E: a (t.py:4)": 1, "F: a (t.py:3)": 1, "too slow": 2}


def test_number_of_reasons_is_limited() -> None:
    counts: dict[str, int] = {}
    for index in range(100):
        count_failure(counts, f"reason {index}")
    assert len(counts) == 17
    assert counts["other reasons"] == 84


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised
