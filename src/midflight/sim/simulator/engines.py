"""Engines on a virtual clock. They are asked about, or changed, at the ends of decode steps only.

Between two changes an engine decodes the same sequences, so what happens at its n-th step from now is a formula: no
time is spent on single tokens. An engine that is changed in the middle of a step finishes that step first; its clock
is then ahead of the time at which the change was asked for.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from midflight.sim.costs import StepCost

_ROUNDING = 1e-9  # of a step: sums of step times that should be equal


class Segment(NamedTuple):
    """Tokens that one engine sampled without an interruption: one at each of its steps from `start` on."""

    engine: int
    start: int
    num_tokens: int
    first_update: int  # how many updates the first token had seen
    offset: int  # tokens the rollout had before


@dataclass(slots=True, eq=False)
class SimRollout:
    """One attempt: how long it will be, and where and when its tokens were sampled."""

    rollout_id: int
    group_id: int
    length: int  # response tokens
    has_gradient: bool = True  # else training on it takes no time
    segments: tuple[Segment, ...] = ()
    num_tokens: int = 0  # of whole segments
    num_carried: int = 0  # tokens it had when it was last interrupted
    num_versions: int = 0  # of those in whole segments
    last_update: int = -1  # how many updates the last of those had seen
    start: int = 0  # step of the first token of the segment that is being sampled


class StepTimes(dict[int, float]):
    """t(h) by h, for sequences that hold no tokens yet: each is worked out once, and looked up very often.

    Raises: ScenarioError past what the cost is known for.
    """

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self._cost, self.per_token = cost, cost.per_token

    def __missing__(self, num_in_flight: int) -> float:
        self[num_in_flight] = time = float(self._cost.step_times(num_in_flight))
        return time


class SimEngine:
    """Sequences in flight, and the steps at which they end."""

    def __init__(self, index: int, step_times: StepTimes) -> None:
        self.index = index
        self.clock = 0.0  # the end of step `step`
        self.step = 0
        self.is_alive = True
        self.busy_time = 0.0
        self.num_generated = 0  # tokens
        self.stamp = 0  # counts changes: an event foreseen before one is void
        self.update_steps: list[int] = []  # from which step on each update is in use
        self._step_times, self._per_token = step_times, step_times.per_token
        self._ends: list[tuple[int, int, SimRollout]] = []  # (step, slot, who): a heap
        self._free_slots: list[int] = []
        self._num_held = 0  # response tokens of all that is in flight
        self._first = self._growth = 0.0  # what the next step takes, and how much longer each further one

    @property
    def num_in_flight(self) -> int:
        return len(self._ends)

    def next_end(self) -> float:
        """When the next sequence ends, if nothing changes; infinite if there is none."""
        return self.clock + self._duration(self._ends[0][0] - self.step) if self._ends else math.inf

    def add(self, rollout: SimRollout, time: float) -> None:
        """Its first token comes from the first step that begins at `time` or later."""
        self.run_to(time)
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._ends)
        rollout.start = self.step
        heapq.heappush(self._ends, (self.step + rollout.length - rollout.num_tokens, slot, rollout))
        self._num_held += rollout.num_tokens
        self._changed()

    def take_ended(self) -> list[SimRollout]:
        """Runs up to the next end; those that end there, in the order of their slots."""
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
        """Takes everything out, with the tokens of all steps that are done at `time`."""
        if time > self.clock and self._ends:
            self._advance(self._num_steps(time, whole=True))
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
        """To the first end of a step at `time` or later."""
        if time <= self.clock:
            return
        if self._ends:
            self._advance(self._num_steps(time))
        else:
            self.clock = time

    def adopt(self, time: float, pause: float) -> None:
        """New weights, before the first step that begins at `time` or later."""
        if not pause:
            num_steps = self._num_steps(time) if self._ends and time > self.clock else 0
            self.update_steps.append(self.step + num_steps)
            return
        self.pause(time, pause)
        self.update_steps.append(self.step)

    def pause(self, time: float, pause: float) -> None:
        """Nothing is decoded for so long after the step in progress, if there is one."""
        self.run_to(time)
        self.clock += pause
        self.stamp += 1

    def generated_by(self, time: float) -> int:
        """Tokens of all steps that are done at `time`; never fewer than at an earlier time."""
        num_steps = self._num_steps(time, whole=True) if self._ends and time > self.clock else 0
        return self.num_generated + num_steps * len(self._ends)

    def _num_steps(self, time: float, whole: bool = False) -> int:
        """How many steps from now end at `time` or before (`whole`), or reach it."""
        elapsed = time - self.clock
        if self._growth:
            half = self._first - self._growth / 2
            steps = (math.sqrt(half * half + 2 * self._growth * elapsed) - half) / self._growth
        else:
            steps = elapsed / self._first
        return math.floor(steps + _ROUNDING) if whole else math.ceil(steps - _ROUNDING)

    def _duration(self, num_steps: int) -> float:
        """Of the next steps: each holds as many tokens more than the last one as there are sequences."""
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
        """The segment that ends with the last step."""
        num_tokens = self.step - rollout.start
        if not num_tokens:
            return
        # Asked now: an update between admission and the first token counts, too.
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
