"""Pool of simulated engines: placement of rollouts, and loss and return of engines."""

from __future__ import annotations

from collections import OrderedDict, deque

from midflight.sim.simulator.engines import SimEngine, SimRollout


class Pool:
    """Engines by load. The next rollout goes to the least loaded engine; equal engines take turns."""

    def __init__(self, engines: list[SimEngine], max_in_flight: int) -> None:
        self._engines, self._max_in_flight = engines, max_in_flight
        self._by_load: list[OrderedDict[int, SimEngine]] = [OrderedDict((engine.index, engine) for engine in engines)]
        self._least = 0  # lower bound on the load of any engine
        self._waiting: deque[SimRollout] = deque()
        self.num_alive = len(engines)
        self._load: dict[int, int] = dict.fromkeys(range(len(engines)), 0)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def alive(self) -> list[SimEngine]:
        return [engine for engine in self._engines if engine.is_alive]

    def place(self, rollouts: list[SimRollout], now: float) -> dict[int, SimEngine]:
        """Place rollouts on the least loaded engines and return the changed engines by index; the rest waits."""
        self._waiting.extend(rollouts)
        changed: dict[int, SimEngine] = {}
        while self._waiting and (engine := self._least_loaded()) is not None:
            engine.add(self._waiting.popleft(), now)
            self._move(engine)
            changed[engine.index] = engine
        return changed

    def take_ended(self, engine: SimEngine) -> list[SimRollout]:
        ended = engine.take_ended()
        self._move(engine)
        return ended

    def interrupt_all(self, now: float) -> list[SimRollout]:
        interrupted = [rollout for engine in self.alive() for rollout in self._interrupt(engine, now)]
        interrupted += self._waiting
        self._waiting.clear()
        return interrupted

    def lose(self, engine: SimEngine, now: float) -> list[SimRollout]:
        """Remove a failed engine and return the rollouts it had in flight."""
        rollouts = self._interrupt(engine, now)
        engine.is_alive = False
        del self._by_load[self._load.pop(engine.index)][engine.index]
        self.num_alive -= 1
        return rollouts

    def come_back(self, engine: SimEngine, now: float) -> None:
        engine.is_alive = True
        engine.run_to(now)
        self.num_alive += 1
        self._load[engine.index] = self._least = 0
        self._by_load[0][engine.index] = engine

    def _interrupt(self, engine: SimEngine, now: float) -> list[SimRollout]:
        rollouts = engine.interrupt(now)
        self._move(engine)
        return rollouts

    def _least_loaded(self) -> SimEngine | None:
        while self._least < len(self._by_load) and not self._by_load[self._least]:
            self._least += 1
        if self._least >= min(len(self._by_load), self._max_in_flight):
            self._least = min(self._least, len(self._by_load) - 1)
            return None
        return next(iter(self._by_load[self._least].values()))

    def _move(self, engine: SimEngine) -> None:
        load = engine.num_in_flight
        while len(self._by_load) <= load:
            self._by_load.append(OrderedDict())
        del self._by_load[self._load[engine.index]][engine.index]
        self._by_load[load][engine.index] = engine
        self._load[engine.index] = load
        self._least = min(self._least, load)
