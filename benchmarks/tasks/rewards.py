"""Rewards: agreement of `math` with the test cases of math-verify, and grades per second of each built-in reward.

The cases are those of github.com/huggingface/Math-Verify (Apache License 2.0), commit 5d148cf: every pair that its
test_all, test_boxed, test_numina_cases, test_open_thoughts, test_strict and test_yujianll compare, with its options.
A case about an option that the reward does not have says why it is left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from midflight.config.tasks import RewardTerm
from midflight.envs.rewards.terms import RewardError, Rewards
from midflight.launch.rewards import build_rewards
from midflight.types import Grade, Problem

CASES = Path(__file__).parent / "math_verify_cases.jsonl"
SECONDS = 1.0  # per reward
_PROSE = "First we add the apples of both baskets, and then we take away the ones that were eaten. "
_PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
# Reward -> options, the right answer, and the end of a response, in which # is the number of the response.
SPEEDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "exact": ({"pattern": "Answer: (.*)"}, "12", "Answer: #"),
    "json_schema": ({"schema": _PERSON}, "", '\n```json\n{"age": #}\n```'),
    "language": ({}, "", "So there are #."),
    "math": ({}, r"\frac{12}{5}", r"So it is \boxed{\frac{#}{5}}."),
    "multiple_choice": ({}, "B", "(#) The answer is B."),
    "numeric": ({}, "12", "So there are #."),
    "regex": ({"pattern": r".*There are \d+\."}, "", "There are #."),
    "soft_length": ({"limit": 1000, "buffer": 500}, "", "#"),
    "think_format": ({}, "", "</think>#"),
}


def measure(say: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows and targets."""
    agreement = _agreement(say)
    rows = [agreement, *(_speed(name, say) for name in SPEEDS)]
    share = agreement["agree"] / agreement["cases"]
    target = {"name": "rewards: cases of math-verify with its result", "value": share, "limit": 1.0}
    return rows, [target | {"holds": share >= 1.0}]


def disagreements() -> Iterator[str]:
    """Yield the cases whose reward is not the expected one, as text."""
    for case in _cases():
        found = _reward_of(case)
        if found != case["expected"]:
            yield f"{case['test']}: {case['answer']!r} and {case['response']!r} give {found}, not {case['expected']}"


def _agreement(say: Callable[[str], None]) -> dict[str, Any]:
    num_cases = sum(1 for _ in _cases())
    num_left_out = sum(1 for _ in CASES.open()) - num_cases
    say(f"rewards: {num_cases} cases of math-verify")
    wrong = list(disagreements())
    for text in wrong:
        say(text)
    return {"reward": "math", "cases": num_cases, "agree": num_cases - len(wrong), "left_out": num_left_out}


def _cases() -> Iterator[dict[str, Any]]:
    with CASES.open() as lines:
        for case in map(json.loads, lines):
            if "left_out" not in case:
                yield case


def _reward_of(case: dict[str, Any]) -> float | str:
    problem = Problem("case", "", answer=case["answer"])
    try:
        return _built("math", case.get("options", {})).grade(problem, case["response"]).reward
    except RewardError as error:
        return str(error)


def _speed(name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure one process that grades different responses of about 500 characters."""
    options, answer, end = SPEEDS[name]
    rewards = _built(name, options)
    problem = Problem("speed", _PROSE, answer=answer)
    begin = "<think>" + 5 * _PROSE
    rewards.grade(problem, begin)  # loads the library
    num_grades, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < SECONDS:
        grade = rewards.grade(problem, begin + end.replace("#", str(num_grades)))
        assert isinstance(grade, Grade)
        num_grades += 1
    say(f"rewards: {name}, {num_grades / elapsed_s:,.0f} grades per second")
    return {"reward": name, "grades_per_s": num_grades / elapsed_s}


def _built(name: str, options: dict[str, Any]) -> Rewards:
    return build_rewards([RewardTerm(type=name, options=options)])
