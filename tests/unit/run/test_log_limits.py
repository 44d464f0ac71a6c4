"""Logs stay small, whatever clients do."""

from __future__ import annotations

import logging

import pytest

from midflight.run.log_limits import LogLimit


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def log(lines: list[str], clock: list[float]) -> logging.Logger:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    handler.addFilter(LogLimit(lambda: clock[0]))
    logger = logging.Logger("flooded")
    logger.addHandler(handler)
    return logger


def test_a_flood_of_one_kind_hides_no_other_lines(log: logging.Logger, lines: list[str]) -> None:
    for number in range(100):
        log.warning("request %d is wrong", number)
        if number == 50:
            log.warning("the weights do not fit")
    assert lines[:5] == [f"request {number} is wrong" for number in range(5)]
    assert lines[5:] == ["the weights do not fit"]


def test_left_out_lines_are_counted(log: logging.Logger, lines: list[str], clock: list[float]) -> None:
    for number in range(20):
        clock[0] = 11.0 if number == 19 else 0.0
        log.warning("100%% of request %d is wrong", number)
    assert lines[-1] == "100% of request 19 is wrong (14 lines like this were left out)"
