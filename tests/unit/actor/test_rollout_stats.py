"""Measurements of weight updates on the rollout side, on a virtual clock."""

from __future__ import annotations

import pytest

from midflight.actor.ledger import Ledger
from midflight.actor.rollout_stats import RolloutStats
from midflight.tracing.spans import Tracer
from midflight.types import ActorState


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("midflight.actor.rollout_stats.time.monotonic", lambda: self.now_s)
        self.tracer = Tracer(None, "test")
        self.stats = RolloutStats(self.tracer, ActorState())

    def updates(self) -> tuple[float | None, float | None]:
        """Return the seconds and the pause of the updates since the last call."""
        metrics = self.stats.snapshot(ActorState(), Ledger(2, 1))
        return metrics.get("update/seconds"), metrics.get("update/pause_s")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_an_update_lasts_until_the_oldest_engine_has_the_version(clock: Clock) -> None:
    assert clock.updates() == (None, None)
    clock.stats.note_asked(1)
    clock.now_s += 2
    assert not clock.stats.note_version(0)
    clock.now_s += 3
    assert clock.updates() == (None, None), "the update has not ended"
    assert clock.stats.note_version(1)
    assert not clock.stats.note_version(1)
    assert clock.updates() == (5.0, 0.0)
    assert clock.updates() == (None, None)


def test_a_replaced_version_counts_from_its_own_request(clock: Clock) -> None:
    for version in (1, 2, 3):
        clock.stats.note_asked(version)
        clock.now_s += 1
    assert clock.stats.note_version(2)  # version 1 was replaced by version 2
    clock.now_s += 4
    assert clock.stats.note_version(3)
    assert clock.updates() == ((3 + 5) / 2, 0.0)


def test_pauses_are_those_of_the_updates_that_ended(clock: Clock) -> None:
    clock.stats.note_asked(1)
    clock.tracer.add("update", 0, 3_000_000_000)
    assert clock.updates() == (None, None)
    clock.tracer.add("update", 0, 1_000_000_000)
    assert clock.stats.note_version(1)
    assert clock.updates() == (0.0, 4.0)
    clock.stats.note_asked(2)
    assert clock.stats.note_version(2)
    assert clock.updates() == (0.0, 0.0)
