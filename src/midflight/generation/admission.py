"""Limits that keep a run first on a server that also answers other clients. Pure decisions: no clock, no I/O.

A guest is a sequence of any client but the run.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

# Beside a run: one guest for so many rollouts, but at least one; and one prompt token of a guest for so many tokens of
# the run. Either costs a large run about 3 % of its tokens if the time of a step is proportional to its tokens.
RUN_PER_GUEST = 32
_MAX_CREDIT = 64.0  # prompt tokens
# A slot counts as free once the run has not used it for one to two of these periods (seconds).
PATIENCE_S = 1.0
LOCAL = "this machine"  # name of the clients on the machine of the server that have no key


class GuestLimit:
    """Number of guests that may have a slot.

    Without a run, guests may have all slots. Beside a run, they may have a few of the slots that it has left free for a
    while, and at least one. A run that generates nothing for a while, for example during training, leaves all of them.
    """

    def __init__(self, num_slots: int | None) -> None:
        """Start without a run. `num_slots`: of the engine; None: not known, and never short."""
        self._num_slots = math.inf if num_slots is None else num_slots
        self._peaks = (0, 0)  # most rollouts of the run in flight, in the last period and in this one
        self._period = -1
        self._credit = 0.0  # prompt tokens that guests may add

    def allowed(self, num_run: int, is_connected: bool, now_s: float) -> float:
        """Return the limit for the next step. `num_run`: rollouts of the run in flight."""
        self._note(num_run, now_s)
        peak = max(self._peaks)
        if not peak or not (is_connected or num_run):
            self._credit = math.inf
            return self._num_slots
        self._credit = min(_MAX_CREDIT, self._credit + min(num_run, self._num_slots) / RUN_PER_GUEST)
        return max(0, min(self._num_slots - peak, max(1, peak // RUN_PER_GUEST)))

    def may_start(self) -> bool:
        """Return True if a guest's prompt may be processed now."""
        return self._credit > 0

    def started(self, num_tokens: int) -> None:
        """Note that a guest with a prefix of this length has been started."""
        self._credit -= num_tokens

    def _note(self, num_run: int, now_s: float) -> None:
        period = int(now_s // PATIENCE_S)
        if period != self._period:
            self._peaks = (self._peaks[1] if period == self._period + 1 else 0, 0)
            self._period = period
        self._peaks = (self._peaks[0], max(self._peaks[1], num_run))


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """Largest number of sequences of guests in flight or waiting, of all clients and of each.

    A long prompt counts as several sequences, so that memory is bounded as well. The clients LOCAL share one address.
    Only the limit on all clients applies to them.
    """

    total: int = 1024
    per_client: int = 256
    tokens_per_sequence: int = 1024

    def size(self, num_sequences: int, num_prompt_tokens: int) -> int:
        """Return the number of sequences that a request counts as."""
        return num_sequences + num_prompt_tokens // self.tokens_per_sequence

    def refusal(self, used: Counter[str], client: str, size: int) -> str | None:
        """Return the reason to refuse a request, or None.

        A client with nothing in flight may make one request of any size, unless others have filled the queue.
        """
        own, all_clients = used[client], used.total()
        if client != LOCAL and own and own + size > self.per_client:
            return f"this client has {own} sequences in flight or waiting, and may have {self.per_client}"
        if all_clients and all_clients + size > self.total:
            return f"{all_clients} sequences are in flight or waiting, and the server takes {self.total}"
        return None


class Pacer:
    """Spaces out pieces of work so that they take at most a share of the time."""

    def __init__(self, share: float, burst_s: float = 0.0) -> None:
        """`burst_s`: delays up to this are skipped, so that a few pieces at once need not wait (seconds)."""
        self._share, self._burst_s = share, burst_s
        self._free_s = -math.inf

    def delay_s(self, cost_s: float, now_s: float) -> float:
        """Plan a piece of work of this duration; return the time to wait before it (seconds)."""
        start_s = max(self._free_s, now_s)
        self._free_s = start_s + cost_s / self._share
        return max(0.0, start_s - now_s - self._burst_s)
