"""Advice about responses that are cut off: given once, from the first responses only."""

from __future__ import annotations

from typing import Any

from midflight.report.length_advice import LengthAdvice


def line(version: int, clipped_fraction: float | None, num_responses: int = 32) -> dict[str, Any]:
    return {
        "version": version,
        "length/clipped_fraction": clipped_fraction,
        "length/by_rollout": [7] * num_responses,
    }


def said(*batches: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    advice = LengthAdvice(40, lines.append)
    for batch in batches:
        advice.update(batch)
    return lines


def test_more_than_half_cut_off_is_said_once_with_the_key() -> None:
    (text,) = said([line(1, 0.25)], [line(2, 1.0), line(3, 1.0)], [line(4, 1.0)], [])
    assert text.startswith("40 of the first 64 responses were cut off at sampling.max_tokens = 40; a larger sampling.")
    assert "\n" not in text


def test_half_cut_off_is_no_reason_for_advice() -> None:
    assert said([line(1, 0.5), line(2, 0.5)]) == []


def test_only_the_first_responses_count() -> None:
    assert said([line(1, 0.0), line(2, 0.0)], [line(version, 1.0) for version in range(3, 9)]) == []


def test_too_few_responses_give_no_advice() -> None:
    assert said([line(1, 1.0)], [line(2, None, 0)]) == []
