"""A run on a virtual clock: the schedules of the real system, engines and a trainer that only take time.

Who waits for whom is as in a real run: batches go to the trainer in the order they were handed over, weights to the
engines between two decode steps, and everything else is for the schedule to say. Nothing happens between events, which
are: an engine's next sequence ends, the trainer ends a step, its weights have arrived, a batch has been preprocessed,
an engine fails or is back. All that happens at the same time has happened before the schedule is asked again.

Lag is counted as in a real run: batch k is trained on by weights of version k, so a token's lag is k less the version
of the engine at the decode step that sampled it.
"""

from __future__ import annotations

import gc
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from midflight.errors import ScenarioError
from midflight.protocols import Schedule
from midflight.sim.costs import StepCost
from midflight.sim.lengths import Lengths
from midflight.sim.simulator.actor import Gradients, SimActor
from midflight.sim.simulator.engines import Engine, SimRollout, StepTimes
from midflight.sim.simulator.failures import NO_FAILURES, Failures
from midflight.sim.simulator.outcome import Outcome, Reading
from midflight.sim.simulator.pool import Pool
from midflight.sim.simulator.recorder import BatchRecorder
from midflight.types import FleetView


@dataclass(frozen=True, slots=True)
class Delays:
    """What keeps weights and batches on their way, and engines from generating; units of time."""

    transfer: float = 0.0  # from the end of an optimizer step until engines may adopt its weights
    preprocess: float = 0.0  # from a batch being handed over until it can be trained on
    update_pause: float = 0.0  # of each engine for each update
    handover_pause: float = 0.0  # of all engines for each batch


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Everything that decides a simulation. Times in one unit, lengths in tokens, sizes in rollouts."""

    schedule: Schedule
    lengths: Lengths
    step_cost: StepCost  # of one engine
    num_engines: int
    batch_size: int
    num_steps: int  # optimizer steps
    train_time_per_token: float  # of all devices that train together
    train_time_per_step: float = 0.0
    group_size: int = 1
    filter_rate: float = 0.0  # share of finished groups that dynamic sampling leaves out
    gradients: Gradients = field(default_factory=Gradients)  # which groups training takes time for
    delays: Delays = field(default_factory=Delays)
    failures: Failures = NO_FAILURES  # what such an engine had in flight goes on elsewhere, with its tokens
    seed: int = 0


def simulate(run: SimulatedRun) -> Outcome:
    """The same result for the same run, always.

    Raises: ScenarioError if the schedule starts nothing more and the trainer has no batch: a real run would hang.
    """
    # Millions of objects and hardly a cycle: the collector would look at all of them again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Simulation(run).finish()
    finally:
        if collects:
            gc.enable()


@dataclass(slots=True)
class _Batch:
    rollouts: list[SimRollout]
    reading: Reading  # when it was handed over


class _Kind:
    """Of events; those at the same time happen in this order."""

    TRAINED, ARRIVED, PREPROCESSED, FAILED, BACK, ENDED = range(6)


class _Simulation:
    def __init__(self, run: SimulatedRun) -> None:
        self._run, self._schedule = run, run.schedule
        self._actor = SimActor(run.lengths, run.group_size, run.filter_rate, run.gradients, run.seed)
        times = StepTimes(run.step_cost)
        self._engines = [Engine(index, times) for index in range(run.num_engines)]
        self._pool = Pool(self._engines, run.schedule.max_in_flight)
        self._recorder = BatchRecorder(self._engines, run.lengths.distribution.max)
        self._events: list[tuple[float, int, int, int, int]] = []  # (time, kind, order, subject, stamp)
        self._order = itertools.count()
        self._now = 0.0
        self._version = self._newest = self._num_trained = 0
        self._preprocessed: deque[_Batch] = deque()  # in order; the trainer takes them
        self._in_preprocessing: deque[_Batch] = deque()
        self._is_training = False
        self._changed: dict[int, Engine] = {}
        self._back_at: dict[int, float] = {}
        for engine in self._engines:
            self._foresee_failure(engine)

    def finish(self) -> Outcome:
        self._decide()
        while self._num_trained < self._run.num_steps:
            if not self._events:
                raise ScenarioError(
                    f"schedule: stuck at optimizer step {self._num_trained}, with {self._actor.ready.num_rollouts}"
                    f" finished rollouts: nothing is in flight and the schedule starts nothing"
                )
            self._now = self._events[0][0]
            while self._events and self._events[0][0] <= self._now:
                _, kind, _, subject, stamp = heapq.heappop(self._events)
                self._happen(kind, subject, stamp)
            self._decide()
        return self._recorder.outcome(self._run.num_steps, self._actor.counts)

    def _happen(self, kind: int, subject: int, stamp: int) -> None:
        match kind:
            case _Kind.ENDED:
                self._rollouts_end(subject, stamp)
            case _Kind.TRAINED:
                self._end_training()
            case _Kind.ARRIVED:
                self._newest = subject
            case _Kind.PREPROCESSED:
                self._preprocessed.append(self._in_preprocessing.popleft())
            case _Kind.FAILED:
                self._at(self._back_at[subject], _Kind.BACK, subject)
                self._place(self._pool.lose(self._engines[subject], self._now))
            case _Kind.BACK:
                self._pool.come_back(self._engines[subject], self._now)
                self._place([])
                self._foresee_failure(self._engines[subject])

    # --- what the schedule decides ----------------------------------------------------------------------------

    def _decide(self) -> None:
        """As a turn of the real rollout loop, until nothing more is decided at this time."""
        schedule, actor = self._schedule, self._actor
        undecided = True
        while undecided:
            undecided = self._hand_over()
            self._start_training()
            fleet = self._fleet()
            if self._newest > self._version and schedule.should_update_weights(fleet):
                self._update()
                fleet = self._fleet()
                undecided = True
            if actor.num_in_flight and schedule.should_abort(fleet):
                self._abort()
                fleet = self._fleet()
                undecided = True
            num_new = schedule.num_to_admit(fleet)
            if num_new:
                self._place([actor.admit(self._recorder.num_updates) for _ in range(num_new)])
        self._foresee()

    def _fleet(self) -> FleetView:
        return self._actor.fleet(self._recorder.num_updates, self._version, self._newest, self._pool.num_alive)

    def _hand_over(self) -> bool:
        """Every batch the schedule can make now; whether there was one. With too few rollouts there can be none."""
        handed_over = False
        while self._actor.ready.num_rollouts >= self._run.batch_size:
            choice = self._schedule.choose_batch(self._fleet(), self._actor.ready)
            if choice is None:
                break
            for group_id in choice.drop:
                self._actor.drop(group_id)
            if choice.train:
                self._queue(_Batch(self._actor.take(choice.train), self._read()))
            handed_over = True
        return handed_over

    def _queue(self, batch: _Batch) -> None:
        delays = self._run.delays
        if delays.handover_pause:
            for engine in self._pool.alive():
                engine.pause(self._now, delays.handover_pause)
                self._changed[engine.index] = engine
        if delays.preprocess:
            self._in_preprocessing.append(batch)
            self._at(self._now + delays.preprocess, _Kind.PREPROCESSED)
        else:
            self._preprocessed.append(batch)

    def _update(self) -> None:
        self._version = self._newest
        pause = self._run.delays.update_pause
        for engine in self._engines:
            engine.adopt(self._now, pause)
            if pause:
                self._changed[engine.index] = engine
        self._recorder.updated(self._version)

    def _abort(self) -> None:
        interrupted = self._pool.interrupt_all(self._now)
        self._recorder.interrupted(interrupted)
        self._actor.interrupted(interrupted)

    # --- engines ----------------------------------------------------------------------------------------------

    def _place(self, rollouts: list[SimRollout]) -> None:
        """On the engines with the fewest in flight; what finds no room waits."""
        self._changed.update(self._pool.place(rollouts, self._now))

    def _rollouts_end(self, index: int, stamp: int) -> None:
        engine = self._engines[index]
        if stamp != engine.stamp:
            return
        for rollout in self._pool.take_ended(engine):
            self._actor.ended(rollout)
        self._changed[index] = engine
        if self._pool.num_waiting:
            self._place([])

    def _foresee(self) -> None:
        """When something ends next on the engines that have changed; what was foreseen of them before is void."""
        for index, engine in self._changed.items():
            if engine.num_in_flight:
                self._at(engine.next_end(), _Kind.ENDED, index, engine.stamp)
        self._changed.clear()

    def _foresee_failure(self, engine: Engine) -> None:
        failure = self._run.failures.next(engine.index, self._now)
        if failure is not None:
            self._back_at[engine.index] = failure.end
            self._at(failure.start, _Kind.FAILED, engine.index)

    # --- the trainer ------------------------------------------------------------------------------------------

    def _start_training(self) -> None:
        if self._is_training or not self._preprocessed:
            return
        batch = self._preprocessed.popleft()
        self._is_training = True
        run = self._run
        num_tokens = sum(rollout.length for rollout in batch.rollouts if rollout.has_gradient)
        end = self._now + run.train_time_per_step + run.train_time_per_token * num_tokens
        self._recorder.trained(batch.rollouts, batch.reading, self._now, end)
        self._at(end, _Kind.TRAINED)

    def _end_training(self) -> None:
        self._is_training = False
        self._num_trained += 1
        self._at(self._now + self._run.delays.transfer, _Kind.ARRIVED, self._num_trained)

    # --- time -------------------------------------------------------------------------------------------------

    def _read(self) -> Reading:
        return self._recorder.read(self._now, self._actor.counts)

    def _at(self, time: float, kind: int, subject: int = 0, stamp: int = 0) -> None:
        heapq.heappush(self._events, (time, kind, next(self._order), subject, stamp))
