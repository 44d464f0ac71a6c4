"""Engines on a virtual clock, read and changed only at the ends of decode steps.

Between two changes, an engine decodes the same sequences. So its state after n more steps is a formula, and single
tokens cost no computation. A change in the middle of a step takes effect at the end of that step: the engine's clock is
then ahead of the time of the request.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from midflight.sim.costs import StepCost

_ROUNDING = 1e-9  # of a step: tolerance for sums of step times that should be equal


class Segment(NamedTuple):
    """Tokens of a rollout that one engine sampled without interruption, one per step from step `start` on."""

    engine: int
    start: int
    num_tokens: int
    first_update: int  # number of weight updates before the first token
    offset: int  # tokens of the rollout before this segment


@dataclass(slots=True, eq=False)
class SimRollout:
    """One rollout: its final length, and where and when its tokens were sampled."""

    rollout_id: int
    group_id: int
    length: int  # response tokens
    has_gradient: bool = True  # False: training on it takes no time
    segments: tuple[Segment, ...] = ()
    num_tokens: int = 0  # in finished segments
    num_carried: int = 0  # tokens at its last interruption
    num_versions: int = 0  # weight versions that sampled the finished segments
    last_update: int = -1  # number of weight updates before the last token of the finished segments
    start: int = 0  # step of the first token of the current segment


class StepTimes(dict[int, float]):
    """Cache of t(h) for sequences without response tokens: each h is computed once and looked up very often.

    Raises: ScenarioError for an h beyond the known cost.
    """

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self._cost, self.per_token = cost, cost.per_token

    def __missing__(self, num_in_flight: int) -> float:
        self[num_in_flight] = time = float(self._cost.step_times(num_in_flight))
        return time


class SimEngine:
    """Sequences in flight on one engine, and the steps at which they end."""

    def __init__(self, index: int, step_times: StepTimes) -> None:
        self.index = index
        self.clock = 0.0  # end of step `step`
        self.step = 0
        self.is_alive = True
        self.busy_time = 0.0
        self.num_generated = 0  # tokens
        self.stamp = 0  # number of changes; an event scheduled before the last change is void
        self.update_steps: list[int] = []  # first step that uses each update
        self._step_times, self._per_token = step_times, step_times.per_token
        self._ends: list[tuple[int, int, SimRollout]] = []  # heap of (step, slot, rollout)
        self._free_slots: list[int] = []
        self._num_held = 0  # response tokens of all sequences in flight
        self._first = self._growth = 0.0  # duration of the next step; added duration of each later step

    @property
    def num_in_flight(self) -> int:
        return len(self._ends)

    def next_end(self) -> float:
        """Time at which the next sequence ends if the engine does not change; infinite if it is idle."""
        return self.clock + self._duration(self._ends[0][0] - self.step) if self._ends else math.inf

    def add(self, rollout: SimRollout, time: float) -> None:
        """Add a rollout, whose next token comes from the first step that begins at `time` or later."""
        self.run_to(time)
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._ends)
        rollout.start = self.step
        heapq.heappush(self._ends, (self.step + rollout.length - rollout.num_tokens, slot, rollout))
        self._num_held += rollout.num_tokens
        self._changed()

    def take_ended(self) -> list[SimRollout]:
        """Run to the next end of a sequence and return all rollouts that end there, in slot order."""
        self._advance(self._ends[0][0] - self.step)
        ended = []
        while self._ends and self._ends[0][0] <= self.step:
            _, slot, rollout = heapq.heappop(self._ends)
            heapq.heappush(self._free_slots, slot)
            self._close(rollout)
            self._num_held -= rollout.num_tokens
            ended.append(rollout)
        self._changed()
        return ended

    def interrupt(self, time: float) -> list[SimRollout]:
        """Remove and return all rollouts, with the tokens of the steps that ended by `time`."""
        if time > self.clock and self._ends:
            self._advance(self._num_steps(time, completed=True))
        interrupted = [rollout for _, _, rollout in sorted(self._ends, key=lambda end: end[1])]
        for rollout in interrupted:
            self._close(rollout)
            rollout.num_carried = rollout.num_tokens
        self._ends.clear()
        self._free_slots.clear()
        self._num_held = 0
        self._changed()
        return interrupted

    def run_to(self, time: float) -> None:
        """Run to the first end of a step at `time` or later."""
        if time <= self.clock:
            return
        if self._ends:
            self._advance(self._num_steps(time))
        else:
            self.clock = time

    def adopt(self, time: float, pause: float) -> None:
        """Adopt new weights before the first step that begins at `time` or later, after `pause`."""
        if not pause:
            num_steps = self._num_steps(time) if self._ends and time > self.clock else 0
            self.update_steps.append(self.step + num_steps)
            return
        self.pause(time, pause)
        self.update_steps.append(self.step)

    def pause(self, time: float, pause: float) -> None:
        """Stop decoding for `pause` after the step in progress, if there is one."""
        self.run_to(time)
        self.clock += pause
        self.stamp += 1

    def generated_by(self, time: float) -> int:
        """Number of tokens sampled in steps that ended by `time`; never decreases with time."""
        num_steps = self._num_steps(time, completed=True) if self._ends and time > self.clock else 0
        return self.num_generated + num_steps * len(self._ends)

    def _num_steps(self, time: float, completed: bool = False) -> int:
        """Number of steps that end by `time` (`completed`), or that it takes to reach `time`."""
        elapsed = time - self.clock
        if self._growth:
            half = self._first - self._growth / 2
            steps = (math.sqrt(half * half + 2 * self._growth * elapsed) - half) / self._growth
        else:
            steps = elapsed / self._first
        return math.floor(steps + _ROUNDING) if completed else math.ceil(steps - _ROUNDING)

    def _duration(self, num_steps: int) -> float:
        """Duration of the next `num_steps` steps; each holds one token more per sequence than the step before."""
        return num_steps * self._first + self._growth * (num_steps * (num_steps - 1) / 2)

    def _advance(self, num_steps: int) -> None:
        duration = self._duration(num_steps)
        self.clock += duration
        self.busy_time += duration
        self.step += num_steps
        num_tokens = num_steps * len(self._ends)
        self.num_generated += num_tokens
        self._num_held += num_tokens
        self._first += self._growth * num_steps

    def _close(self, rollout: SimRollout) -> None:
        """Append to the rollout the segment that ends with the last step."""
        num_tokens = self.step - rollout.start
        if not num_tokens:
            return
        # Looked up only now: an update between admission and the first token counts, too.
        first_update = bisect_right(self.update_steps, rollout.start)
        last_update = bisect_right(self.update_steps, self.step - 1)
        segment = Segment(self.index, rollout.start, num_tokens, first_update, rollout.num_tokens)
        rollout.segments = (*rollout.segments, segment)
        rollout.num_tokens += num_tokens
        rollout.num_versions += last_update - first_update + (rollout.last_update != first_update)
        rollout.last_update = last_update

    def _changed(self) -> None:
        self.stamp += 1
        self._first = self._step_times[len(self._ends)] + self._per_token * self._num_held
        self._growth = self._per_token * len(self._ends)
