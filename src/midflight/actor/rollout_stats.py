"""Measurements of the rollout side between two batches."""

from __future__ import annotations

import time

from midflight.actor.ledger import Ledger
from midflight.tracing.spans import Tracer
from midflight.types import ActorState


class RolloutStats:
    """Rates, waiting times and left-out groups since the last `snapshot`."""

    def __init__(self, tracer: Tracer, state: ActorState) -> None:
        self._tracer = tracer
        self._time_s = time.monotonic()
        self._state = state
        self._wait_s = self._update_s = 0.0
        self._update_bytes = 0

    def note_update(self, num_bytes: int) -> None:
        self._update_bytes += num_bytes

    def snapshot(self, state: ActorState, ledger: Ledger) -> dict[str, float]:
        before, now_s = self._state, time.monotonic()
        elapsed_s = max(now_s - self._time_s, 1e-9)
        wait_s = self._tracer.total_s("wait") - self._wait_s
        update_s = self._tracer.total_s("update") - self._update_s
        num_updates = state.num_updates - before.num_updates
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
        if num_updates:
            metrics["update/pause_s"] = update_s / num_updates
            metrics["update/seconds"] = update_s
            metrics["update/bytes"] = float(self._update_bytes)
        self._time_s, self._state = now_s, state
        self._update_bytes = 0
        self._wait_s += wait_s
        self._update_s += update_s
        return metrics
