"""Limits that keep a run first: slots, rows and prompts of guests, the queue, and the pace of requests."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from midflight.generation.admission import LOCAL, PATIENCE_S, RUN_PER_GUEST, GuestLimit, Pacer, QueueLimit


def test_guests_have_all_slots_without_a_run() -> None:
    limit = GuestLimit(64)
    assert limit.allowed(0, False, 0.0) == 64
    assert limit.may_start()
    assert GuestLimit(None).allowed(0, False, 0.0) == math.inf


def test_guests_get_only_slots_that_stay_free() -> None:
    limit = GuestLimit(64)
    assert limit.allowed(63, True, 0.0) == 1
    assert limit.allowed(64, True, 0.1) == 0
    assert limit.allowed(40, True, 0.2) == 0, "a successor may come at any moment"
    assert limit.allowed(40, True, 0.2 + 2 * PATIENCE_S) == 40 // RUN_PER_GUEST
    assert limit.allowed(64, True, 0.3 + 2 * PATIENCE_S) == 0, "the run takes its slots back at once"
    assert limit.allowed(2, True, 9.0) == 1, "a small run does not shut others out"


def test_a_run_that_generates_nothing_leaves_all_slots() -> None:
    limit = GuestLimit(8)
    assert limit.allowed(8, True, 0.0) == 0
    assert limit.allowed(0, True, 0.5 * PATIENCE_S) == 0
    assert limit.allowed(0, True, 2.5 * PATIENCE_S) == 8


def test_prompts_of_guests_are_a_small_share_of_the_tokens_of_a_run() -> None:
    limit, num_run, num_prompt_tokens = GuestLimit(128), 100, 1000
    num_started = num_steps = 0
    while num_started < 5:
        limit.allowed(num_run, True, num_steps * 1e-3)
        num_steps += 1
        if limit.may_start():
            limit.started(num_prompt_tokens)
            num_started += 1
    assert 5 * num_prompt_tokens <= num_steps * num_run / RUN_PER_GUEST + num_prompt_tokens


def test_queue_refuses_clients_and_totals() -> None:
    limit, used = QueueLimit(total=10, per_client=6), Counter({"a": 5, "b": 2})
    assert limit.refusal(used, "a", 1) is None
    assert "this client has 5" in (limit.refusal(used, "a", 2) or "")
    assert limit.refusal(used, "c", 3) is None
    assert limit.refusal(Counter({LOCAL: 6}), LOCAL, 4) is None, "one address, many clients"
    assert "the server takes 10" in (limit.refusal(used, "c", 4) or "")
    assert limit.refusal(Counter(), "c", 4000) is None, "an idle server takes one request of any size"
    assert limit.size(2, 5000) == 6


def test_pacer_keeps_its_share_of_the_time() -> None:
    pacer, now_s = Pacer(0.05), 7.0
    for _ in range(10):
        now_s += pacer.delay_s(0.004, now_s)
    assert now_s - 7.0 == pytest.approx(9 * 0.004 / 0.05)
    assert pacer.delay_s(0.004, now_s + 60) == 0.0, "rest is not saved up"


def test_pacer_lets_a_burst_through() -> None:
    pacer = Pacer(0.1, burst_s=0.25)
    assert [round(pacer.delay_s(0.01, 0.0), 9) for _ in range(5)] == [0, 0, 0, 0.05, 0.15]
