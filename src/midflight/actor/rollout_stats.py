"""Measurements of the rollout side between two batches."""

from __future__ import annotations

import time

from midflight.actor.ledger import Ledger
from midflight.tracing.spans import Tracer
from midflight.types import ActorState


class RolloutStats:
    """Rates, waiting times, weight updates and left-out groups since the last `snapshot`.

    The tracer's spans "update" are the pauses: nothing was decoded because of an update.
    """

    def __init__(self, tracer: Tracer, state: ActorState) -> None:
        self._tracer = tracer
        self._time_s = time.monotonic()
        self._state = state
        self._wait_s = self._pause_s = 0.0
        self._asked: dict[int, float] = {}  # versions that no engine was asked for before, and when -> seconds
        self._update_s: list[float] = []  # durations of the updates since the last snapshot

    def note_asked(self, version: int) -> None:
        """Note that the engines were asked to adopt a version."""
        self._asked[version] = time.monotonic()

    def note_version(self, version: int) -> bool:
        """Note the version of the oldest engine; return True if this ends an update."""
        if not self._asked:
            return False
        ended = [asked for asked in self._asked if asked <= version]
        if ended:
            self._update_s.append(time.monotonic() - self._asked[ended[0]])
        for asked in ended:
            del self._asked[asked]
        return bool(ended)

    def snapshot(self, state: ActorState, ledger: Ledger) -> dict[str, float]:
        before, now_s = self._state, time.monotonic()
        elapsed_s = max(now_s - self._time_s, 1e-9)
        wait_s = self._tracer.total_s("wait") - self._wait_s
        pause_s = self._tracer.total_s("update") - self._pause_s
        metrics = {
            "in_flight": float(ledger.num_in_flight),
            "throughput/generated_tokens_per_s": (state.generated_tokens - before.generated_tokens) / elapsed_s,
            "idle/generation_fraction": min(1.0, wait_s / elapsed_s),
            "time/rollout_s": max(0.0, elapsed_s - wait_s),
            "dropped/filtered_groups": float(state.num_filtered_groups - before.num_filtered_groups),
            "dropped/queue_full_groups": float(state.num_dropped_groups - before.num_dropped_groups),
            "dropped/failed_groups": float(state.num_failed_groups - before.num_failed_groups),
            "queue/waiting_rollouts": float(ledger.ready.num_rollouts),
            "queue/ungraded_rollouts": float(ledger.num_ungraded),
            "aborted_rollouts": float(state.num_aborted - before.num_aborted),
        }
        if self._update_s:
            metrics["update/pause_s"] = pause_s / len(self._update_s)
            metrics["update/seconds"] = sum(self._update_s) / len(self._update_s)
        self._time_s, self._state = now_s, state
        self._wait_s += wait_s
        if self._update_s:
            self._pause_s += pause_s
            self._update_s = []
        return metrics
