"""Reasons of failed verifiers: one line with the place in the user's code, and readable counts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from midflight.actor import failures
from midflight.actor.failures import RecentFailures, count_failure, reason_of
from midflight.actor.grading import LiveEpisodes
from midflight.envs.chain_sums import ChainSums
from midflight.errors import RolloutError
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


def num_noted(reasons: str, max_fraction: float) -> int | None:
    """Number of rollouts after which the run ends; in `reasons`, a dot is a rollout that did not fail."""
    recent = RecentFailures(max_fraction)
    for index, reason in enumerate(reasons, 1):
        try:
            recent.note("" if reason == "." else f"ValueError: {reason} (task.py:{ord(reason)})")
        except RolloutError:
            return index
    return None


@pytest.mark.parametrize(
    ("reasons", "max_fraction", "expected"),
    [
        ("x" * 63, 0.1, None),
        ("x" * 64, 1.0, 64),
        ("x" * 63 + "." + "x" * 300, 1.0, 64 + 256),
        ("." + "x" * 62 + ".x", 0.97, None),
        ("." + "x" * 62 + ".x", 0.96, 65),
        ("." * 1000 + "x" * 200, 0.5, 1000 + 129),
        (".x" * 500, 0.5, None),
        (".xx" * 500, 0.5, 65),
        (("." * 31 + "x") * 100, 1 / 32, None),
    ],
)
def test_too_large_a_share_of_failures_ends_the_run(reasons: str, max_fraction: float, expected: int | None) -> None:
    assert num_noted(reasons, max_fraction) == expected


def test_end_of_a_run_names_the_most_frequent_reason() -> None:
    recent = RecentFailures(0.5)
    for number in range(63):
        rare = number % 4 == 3
        recent.note(f"KeyError: 'x' (a.py:{1 + rare})" if rare else f"ValueError: {number} is odd (a.py:7)")
    with pytest.raises(RolloutError) as raised:
        recent.note("KeyError: 'x' (a.py:2)")
    assert str(raised.value) == (
        "64 of the last 64 rollouts failed (task.max_failed_fraction = 0.5); the most frequent reason, 48 times:"
        " ValueError: 0 is odd (a.py:7)"
    )
