"""A run on a virtual clock: the real schedules, with engines and a trainer that only take time.

Waiting is as in a real run: the trainer takes batches in the order of their handover, engines adopt weights between two
decode steps, and the schedule decides the rest. State changes only at events: an engine's next sequence ends, the
trainer ends a step, weights arrive, a batch has been preprocessed, an engine fails or is back. All events of one time
are processed before the schedule is asked again.

Lag is counted as in a real run: batch k trains weights of version k, so the lag of a token is k minus the engine's
version at the decode step that sampled the token.
"""

from __future__ import annotations

import gc
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from midflight.actor.iteration import iterate
from midflight.actor.ledger import Ledger
from midflight.errors import ScenarioError
from midflight.protocols import Schedule
from midflight.sim.costs import StepCost
from midflight.sim.lengths import Lengths
from midflight.sim.simulator.engines import SimEngine, SimRollout, StepTimes
from midflight.sim.simulator.failures import NO_FAILURES, Failures
from midflight.sim.simulator.groups import Gradients, SimGroups
from midflight.sim.simulator.pool import Pool
from midflight.sim.simulator.recorder import BatchRecorder
from midflight.sim.simulator.result import SimulationResult, Snapshot
from midflight.types import BatchChoice, FleetView, GroupId, RolloutId


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of weights and batches, and pauses of engines, in the scenario's unit of time."""

    transfer: float = 0.0  # from the end of an optimizer step until engines may adopt its weights
    preprocess: float = 0.0  # from a batch being handed over until it can be trained on
    update_pause: float = 0.0  # per engine and update
    handover_pause: float = 0.0  # per batch, for all engines


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Complete input of a simulation. Times in one unit, lengths in tokens, sizes in rollouts."""

    schedule: Schedule
    lengths: Lengths
    step_cost: StepCost  # of one engine
    num_engines: int
    batch_size: int
    num_steps: int  # optimizer steps
    train_time_per_token: float  # on all training devices together
    train_time_per_step: float = 0.0
    group_size: int = 1
    filter_rate: float = 0.0  # share of finished groups that dynamic sampling leaves out
    gradients: Gradients = field(default_factory=Gradients)  # groups that cost training time
    delays: Delays = field(default_factory=Delays)
    failures: Failures = NO_FAILURES  # rollouts of a failed engine continue elsewhere and keep their tokens
    seed: int = 0


def simulate(run: SimulatedRun) -> SimulationResult:
    """Run the simulation; the same run always gives the same result.

    Raises: ScenarioError if nothing is in flight, the schedule starts no rollout and the trainer has no batch. A real
        run would hang there.
    """
    # Millions of objects and hardly any cycles: the garbage collector would traverse all of them repeatedly.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Simulation(run).finish()
    finally:
        if collects:
            gc.enable()


_Batch = tuple[list[SimRollout], Snapshot]  # rollouts, and the totals at the handover


class _Kind:
    """Kinds of events; events at the same time are processed in this order."""

    TRAINED, ARRIVED, PREPROCESSED, FAILED, BACK, ENDED = range(6)


class _Simulation:
    def __init__(self, run: SimulatedRun) -> None:
        self._run, self._schedule = run, run.schedule
        self._ledger = Ledger(run.batch_size, run.group_size)
        self._groups = SimGroups(run.lengths, run.group_size, run.filter_rate, run.gradients, run.seed)
        times = StepTimes(run.step_cost)
        self._engines = [SimEngine(index, times) for index in range(run.num_engines)]
        self._pool = Pool(self._engines, run.schedule.max_in_flight)
        self._recorder = BatchRecorder(self._engines, run.lengths.distribution.max)
        self._events: list[tuple[float, int, int, int, int]] = []  # (time, kind, order, subject, stamp)
        self._order = itertools.count()
        self._now = 0.0
        self._version = self._newest = self._num_trained = 0
        self._preprocessed: deque[_Batch] = deque()  # in order of handover
        self._in_preprocessing: deque[_Batch] = deque()
        self._is_training = False
        self._is_undecided = False  # the schedule acted, and may act again at this time
        self._changed: dict[int, SimEngine] = {}
        self._back_at: dict[int, float] = {}
        for engine in self._engines:
            self._schedule_failure(engine)

    def finish(self) -> SimulationResult:
        while self._num_trained < self._run.num_steps:
            iterate(self._schedule, self._ledger, self)
            self._start_training()
        return self._recorder.result(self._run.num_steps)

    def _process(self, kind: int, subject: int, stamp: int) -> None:
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
                self._schedule_failure(self._engines[subject])

    # --- what the schedule decides ----------------------------------------------------------------------------

    def fleet(self) -> FleetView:
        return self._ledger.fleet(self._version, self._newest, self._pool.num_alive)

    def update_weights(self) -> None:
        self._is_undecided = True
        self._version = self._newest
        pause = self._run.delays.update_pause
        for engine in self._engines:
            engine.adopt(self._now, pause)
            if pause:
                self._changed[engine.index] = engine
        self._recorder.updated(self._version)

    def abort(self) -> None:
        self._is_undecided = True
        interrupted = self._pool.interrupt_all(self._now)
        self._recorder.interrupted(interrupted)
        self._ledger.interrupted([RolloutId(rollout.rollout_id) for rollout in interrupted])

    def admit(self, num_rollouts: int) -> None:
        ledger, version, num_updates = self._ledger, self._version, self._recorder.num_updates
        rollouts = []
        for _ in range(num_rollouts):
            rollout_id = ledger.admit()
            rollout = self._groups.rollout(rollout_id)
            num_versions = rollout.num_versions + (rollout.last_update != num_updates)
            ledger.started(rollout_id, num_versions, version)
            rollouts.append(rollout)
        self._place(rollouts)

    def generate(self) -> None:
        """Advance to the next events, unless the schedule may act again at this time."""
        if self._is_undecided:
            self._is_undecided = False
            return
        self._schedule_ends()
        if not self._events:
            raise ScenarioError(
                f"schedule: stuck at optimizer step {self._num_trained}, with {self._ledger.ready.num_rollouts}"
                f" finished rollouts: nothing is in flight and the schedule starts no rollout; check its limits"
                " against batch.batch_size"
            )
        self._now = self._events[0][0]
        while self._events and self._events[0][0] <= self._now:
            _, kind, _, subject, stamp = heapq.heappop(self._events)
            self._process(kind, subject, stamp)

    def has_room(self) -> bool:
        return True

    def hand_over(self, choice: BatchChoice) -> None:
        self._is_undecided = True
        for group_id in choice.drop:
            self._ledger.drop(group_id, self._groups.discard(group_id))
        if not choice.train:
            return
        self._ledger.take(choice.train)
        batch = self._groups.take(choice.train), self._read()
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

    # --- engines ----------------------------------------------------------------------------------------------

    def _place(self, rollouts: list[SimRollout]) -> None:
        """Place rollouts on the least loaded engines; the rest waits."""
        self._changed.update(self._pool.place(rollouts, self._now))

    def _rollouts_end(self, index: int, stamp: int) -> None:
        engine = self._engines[index]
        if stamp != engine.stamp:
            return
        for rollout in self._pool.take_ended(engine):
            self._end(rollout)
        self._changed[index] = engine
        if self._pool.num_waiting:
            self._place([])

    def _end(self, rollout: SimRollout) -> None:
        """Process the end of a rollout, which is graded at once."""
        ledger, rollout_id, group_id = self._ledger, RolloutId(rollout.rollout_id), GroupId(rollout.group_id)
        ledger.ended(rollout_id)
        if not ledger.done(rollout_id, rollout.length):
            return
        if self._groups.is_filtered(group_id):
            ledger.filter(group_id, self._groups.discard(group_id))
        else:
            ledger.make_ready(group_id)

    def _schedule_ends(self) -> None:
        """Schedule the next end of a sequence on each changed engine; the engine's earlier event is void."""
        for index, engine in self._changed.items():
            if engine.num_in_flight:
                self._at(engine.next_end(), _Kind.ENDED, index, engine.stamp)
        self._changed.clear()

    def _schedule_failure(self, engine: SimEngine) -> None:
        failure = self._run.failures.next(engine.index, self._now)
        if failure is not None:
            self._back_at[engine.index] = failure.end
            self._at(failure.start, _Kind.FAILED, engine.index)

    # --- the trainer ------------------------------------------------------------------------------------------

    def _start_training(self) -> None:
        if self._is_training or not self._preprocessed:
            return
        rollouts, handed_over = self._preprocessed.popleft()
        self._is_training = True
        run = self._run
        num_tokens = sum(rollout.length for rollout in rollouts if rollout.has_gradient)
        end = self._now + run.train_time_per_step + run.train_time_per_token * num_tokens
        self._recorder.trained(rollouts, handed_over, self._now, end)
        self._at(end, _Kind.TRAINED)

    def _end_training(self) -> None:
        self._is_training = False
        self._num_trained += 1
        self._at(self._now + self._run.delays.transfer, _Kind.ARRIVED, self._num_trained)

    # --- time -------------------------------------------------------------------------------------------------

    def _read(self) -> Snapshot:
        return self._recorder.read(self._now, self._ledger.state, self._groups.discarded_tokens)

    def _at(self, time: float, kind: int, subject: int = 0, stamp: int = 0) -> None:
        heapq.heappush(self._events, (time, kind, next(self._order), subject, stamp))
