"""EnginePool: engines join, leave, are lost, stopped and adopt new weights at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.concurrency.background import run_at_once, run_in_background
from midflight.errors import GenerationError, GenerationLostError, NonFiniteWeightsError, RequestError
from midflight.generation.members import PATIENCE_S
from midflight.generation.news import News
from midflight.generation.placement import newest_version_of
from midflight.generation.pool import EnginePool, PoolHooks
from midflight.protocols import NO_VERSION
from midflight.types import (
    Completion,
    FinishReason,
    GeneratedTokens,
    GenerationRequest,
    RolloutId,
    SamplingParams,
)


def token(rollout_id: int, position: int) -> int:
    return (rollout_id * 31 + position * 7) % 101


@dataclass
class Arrivals:
    """Counts, shared by all engines, of how often each token has arrived at the client."""

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)


class FakeEngine:
    """Client of a simulated server: tokens arrive in chunks of `chunk_tokens`; the rest are lost with the server.

    If `holds_back`, the server adopts the version it was asked for when the test calls `receive`.
    """

    num_engines = 1

    def __init__(self, arrivals: Arrivals, chunk_tokens: int = 1, holds_back: bool = False) -> None:
        self.arrivals, self.chunk_tokens, self.holds_back = arrivals, chunk_tokens, holds_back
        self.weight_version = self.wanted = NO_VERSION
        self.refusal: Exception | None = None  # raised by the next step
        self.is_lost = self.is_stopped = self.hung_up = False
        self.refuses: str | None = None
        self.running: dict[RolloutId, tuple[GenerationRequest, list[int], int]] = {}  # request, versions, num resumed

    @property
    def num_in_flight(self) -> int:
        return len(self.running)

    def add(self, requests: list[GenerationRequest]) -> None:
        if self.is_lost or self.is_stopped:
            raise GenerationLostError("connection refused")
        if self.refuses:
            raise RequestError(self.refuses)
        for request in requests:
            assert self.weight_version != NO_VERSION, "a request was added before the first weights"
            versions = request.generated.weight_versions.tolist() if request.generated else []
            assert newest_version_of(request) <= self.weight_version, "a token of the request is newer"
            self.running[request.rollout_id] = request, versions, len(versions)

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        _, versions, known = self.running[rollout_id]
        num_arrived = known + (len(versions) - known) // self.chunk_tokens * self.chunk_tokens
        return tokens_of(rollout_id, versions[:num_arrived]).part(start)

    def step(self) -> list[Completion]:
        if self.is_lost and self.running:
            raise GenerationLostError("the stream broke off")
        if refusal := self.refusal:
            self.refusal = None
            raise refusal
        if self.is_stopped:
            return [self._take(rollout_id, FinishReason.ABORT) for rollout_id in list(self.running)]
        ended = []
        for rollout_id, (request, versions, _) in list(self.running.items()):
            versions.append(self.weight_version)
            if len(versions) == request.sampling.max_tokens:
                ended.append(self._take(rollout_id, FinishReason.LENGTH))
        return ended

    def abort(self, rollout_ids: list[RolloutId]) -> list[Completion]:
        return [self._take(key, FinishReason.ABORT) for key in rollout_ids if key in self.running]

    def adopt(self, version: int) -> None:
        self.wanted = max(self.wanted, version)
        if not self.holds_back:
            self.weight_version = max(self.weight_version, version)

    def receive(self, version: int | None = None) -> None:
        """Weights of this version arrive, by default of the version asked for."""
        if not self.is_lost:
            self.weight_version = max(self.weight_version, self.wanted if version is None else version)

    def hang_up(self) -> None:
        self.hung_up = True

    def _take(self, rollout_id: RolloutId, reason: FinishReason) -> Completion:
        generated = self.generated(rollout_id) if self.is_lost else tokens_of(rollout_id, self.running[rollout_id][1])
        _, _, known = self.running.pop(rollout_id)
        self.arrivals.counts.update((rollout_id, position) for position in range(known, len(generated)))
        return Completion(rollout_id, generated, reason)


class RemoteEngine(FakeEngine):
    """Client of a simulated server that generates by itself, in `tick`, and notifies only of what is new."""

    def __init__(self, arrivals: Arrivals, chunk_tokens: int, holds_back: bool, notify: Callable[[], object]) -> None:
        super().__init__(arrivals, chunk_tokens, holds_back)
        self._notify, self._told = notify, self.weight_version
        self._ended: list[Completion] = []
        self._failure: Exception | None = None

    def tick(self) -> None:
        try:
            ended = super().step()
        except GenerationLostError as error:
            ended, self._failure = [], error
        self._ended += ended
        if ended or self._failure or self._told != self.weight_version:
            self._told = self.weight_version
            self._notify()

    def step(self) -> list[Completion]:
        if self._failure is not None and not self._ended:
            raise self._failure
        ended, self._ended = self._ended, []
        return ended


def tokens_of(rollout_id: int, versions: list[int]) -> GeneratedTokens:
    token_ids = [token(rollout_id, position) for position in range(len(versions))]
    return GeneratedTokens(
        np.array(token_ids, np.int32), np.zeros(len(versions), np.float32), np.array(versions, np.int32)
    )


def request(rollout_id: int, num_tokens: int = 8) -> GenerationRequest:
    prompt = np.array([rollout_id // 4, 1], np.int32)  # siblings in fours
    return GenerationRequest(RolloutId(rollout_id), prompt, SamplingParams(num_tokens), seed=0)


class Controls:
    """A pool with a clock and background calls that the test controls; with `news`, of remote engines."""

    def __init__(self, news: News | None = None, **options: object) -> None:
        self.arrivals, self.now_s, self.logged = Arrivals(), 0.0, list[str]()
        self.recalls: list[tuple[Callable[[], None], Future[None]]] | None = None
        hooks = PoolHooks(log=self._log, left=self._log)
        self.news = news
        self.pool = EnginePool(0, run=self._run, news=news, hooks=hooks, clock=lambda: self.now_s, **options)  # type: ignore[arg-type]
        self.engines: dict[str, FakeEngine] = {}
        self.hold_back = False  # for engines that join later

    def join(self, chunk_tokens: int = 1, num_slots: int | None = None) -> FakeEngine:
        name = f"e{len(self.engines)}"
        if self.news is None:
            engine = FakeEngine(self.arrivals, chunk_tokens, self.hold_back)
        else:
            engine = RemoteEngine(self.arrivals, chunk_tokens, self.hold_back, self.news.notifier(name))
        self.engines[name] = engine
        self.pool.join(name, engine, engine.hang_up, num_slots)  # type: ignore[arg-type]
        return engine

    def _log(self, name: str, text: str) -> None:
        self.logged.append(f"{name} {text}")

    def defer(self) -> None:
        """From now on, weights arrive only at `receive`, and the calls of the pool in the background at `finish`."""
        self.recalls, self.hold_back = [], True
        for engine in self.engines.values():
            engine.holds_back = True

    def finish_recalls(self) -> None:
        """Run the deferred calls, which take requests back from members that were set aside."""
        assert self.recalls is not None
        while self.recalls:
            self.finish()

    def finish(self, index: int = 0) -> None:
        assert self.recalls is not None
        function, future = self.recalls.pop(index)
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def step(self) -> list[Completion]:
        for engine in self.engines.values():
            if isinstance(engine, RemoteEngine) and not engine.hung_up:
                engine.tick()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("midflight.generation.pool.STEP_S", 0.0)
            return self.pool.step()

    def drain(self) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        while self.pool.num_in_flight:
            self.now_s += 0.1
            for completion in self.step():
                assert completion.rollout_id not in done
                done[completion.rollout_id] = completion
        return done

    def _run(self, function):  # type: ignore[no-untyped-def]
        if self.recalls is None or function.func.__name__ != "abort":
            return run_at_once(function)
        future: Future[None] = Future()
        self.recalls.append((function, future))
        return future


def check(completion: Completion, num_tokens: int = 8) -> None:
    versions = completion.generated.weight_versions
    assert completion.finish_reason is FinishReason.LENGTH
    expected = [token(completion.rollout_id, position) for position in range(num_tokens)]
    assert completion.generated.token_ids.tolist() == expected
    assert (np.diff(versions) >= 0).all()


def test_requests_are_spread_and_siblings_stay_together() -> None:
    controls = Controls()
    first, second = controls.join(), controls.join()
    assert controls.pool.num_engines == 2
    for rollout_id in range(16):
        controls.pool.add([request(rollout_id)])
    assert sorted(first.running) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert sorted(second.running) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert controls.pool.num_in_flight == 16
    assert len(controls.drain()) == 16


def test_no_request_waits_for_a_slot_while_another_engine_has_one() -> None:
    """Siblings part, and the larger engine gets the rest, although it has more requests than the other one."""
    controls = Controls()
    small, large = controls.join(num_slots=2), controls.join(num_slots=6)
    for rollout_id in range(8):
        controls.pool.add([request(rollout_id)])
    assert (len(small.running), len(large.running)) == (2, 6)


def test_requests_of_a_lost_engine_resume_from_arrived_tokens() -> None:
    controls = Controls()
    first, second = controls.join(chunk_tokens=3), controls.join()
    controls.pool.add([request(rollout_id) for rollout_id in range(8)])
    for _ in range(4):
        assert controls.pool.step() == []
    first.is_lost = True
    controls.pool.step()
    assert controls.pool.names == {"e1"}
    assert first.hung_up
    assert "e0 left: the stream broke off; 4 rollouts go on elsewhere" in controls.logged
    assert {len(controls.pool.generated(RolloutId(number))) for number in range(4)} == {3}
    assert {len(controls.pool.generated(RolloutId(number))) for number in range(4, 8)} == {5}
    assert list(second.running)[-4:] == [0, 1, 2, 3], "requests must be placed in the order of their ids"
    done = controls.drain()
    assert len(done) == 8
    for completion in done.values():
        check(completion)
    assert set(controls.arrivals.counts.values()) == {1}


def test_request_finished_before_its_engine_was_lost_completes() -> None:
    controls = Controls()
    engine = controls.join()
    controls.pool.add([request(0, num_tokens=2), request(1)])
    controls.pool.step()
    abort = engine.abort
    engine.abort = lambda rollout_ids: abort([key for key in rollout_ids if key != 0])  # type: ignore[method-assign]
    controls.pool.lose("e0", "it hangs")
    (completion,) = controls.pool.step()
    check(completion, num_tokens=2)
    assert controls.pool.num_in_flight == 1


def test_requests_wait_for_an_engine_until_the_join_timeout() -> None:
    controls = Controls(join_timeout_s=100.0)
    pool = controls.pool
    pool.add([request(0)])
    assert (pool.num_in_flight, pool.num_engines, pool.step()) == (1, 1, [])
    assert len(pool.generated(RolloutId(0))) == 0
    controls.now_s = 99
    assert pool.step() == []
    controls.join()
    check(controls.drain()[0])
    pool.leave("e0", "enough")
    controls.now_s = 1000
    pool.add([request(1)])
    assert pool.step() == []
    controls.now_s = 1101
    with pytest.raises(GenerationLostError, match="no engine has joined within 100 s; 1 rollouts wait for one"):
        pool.step()


def test_new_member_gets_requests_after_its_weights() -> None:
    controls = Controls()
    controls.defer()
    engine = controls.join()
    controls.pool.add([request(0)])
    controls.pool.adopt(1)
    assert controls.pool.step() == []
    assert (engine.wanted, list(engine.running)) == (1, [])
    engine.receive()
    controls.pool.step()
    assert (engine.weight_version, list(engine.running), controls.pool.weight_version) == (1, [0], 1)
    assert controls.logged == ["e0 joined with weights of version 1"]


def test_member_with_weights_of_the_pool_joins_at_once() -> None:
    """A server that was in the run before has the weights already, although a newer version is on its way."""
    controls = Controls()
    first = controls.join()
    controls.defer()
    controls.pool.adopt(1)
    second = FakeEngine(controls.arrivals, holds_back=True)
    second.receive(0)
    controls.pool.join("again", second)  # type: ignore[arg-type]
    assert (controls.pool.num_engines, controls.pool.weight_version) == (2, 0)
    assert second.wanted == 1
    first.receive()
    controls.pool.step()
    assert controls.pool.weight_version == 0


def test_slow_joining_member_does_not_delay_updates() -> None:
    controls = Controls()
    first = controls.join()
    pool = controls.pool
    pool.add([request(0, num_tokens=20)])
    controls.hold_back = True
    slow = controls.join()
    for version in (1, 2, 3):
        pool.adopt(version)
        pool.step()
        assert (pool.weight_version, first.weight_version) == (version, version)
    slow.receive(0)
    pool.step()
    assert (slow.weight_version, pool.num_engines, pool.weight_version) == (0, 1, 3)
    assert controls.logged[-1] == (
        "e1 gets no requests until it has caught up: it has version 0, and others sample with 3"
    )
    slow.receive()
    pool.step()
    assert (slow.weight_version, pool.num_engines, pool.weight_version) == (3, 2, 3)
    assert controls.logged[-1] == "e1 joined with weights of version 3"


def test_late_member_is_set_aside_until_caught_up() -> None:
    controls = Controls()
    late, other = controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(0), request(4)])
    pool.step()
    controls.defer()
    pool.adopt(1)
    other.receive()
    pool.step()
    assert pool.weight_version == 0
    controls.now_s = PATIENCE_S * 1.5
    pool.step()
    assert (pool.weight_version, pool.num_engines) == (1, 1)
    assert list(late.running) == [0], "the recall is deferred, so the requests must still be there"
    controls.finish_recalls()
    pool.step()
    assert sorted(other.running) == [0, 4]
    pool.adopt(2)
    other.receive()
    pool.step()
    assert (pool.weight_version, late.weight_version) == (2, 0)
    late.receive(1)
    pool.step()
    assert pool.num_engines == 1
    late.receive()
    pool.step()
    assert pool.num_engines == 2
    assert controls.logged[2:] == [
        "e0 gets no requests until it has caught up: it has version 0, and others sample with 1"
    ]
    done = controls.drain()
    for completion in done.values():
        check(completion)
    assert np.unique(done[0].generated.weight_versions).tolist() == [0, 2]


def test_members_are_late_only_behind_most_others() -> None:
    """No member is set aside soon while only a minority has a version, and none before others have it."""
    controls = Controls(patience_s=30.0)
    engines = [controls.join() for _ in range(3)]
    controls.defer()
    controls.pool.adopt(1)
    controls.now_s = 100
    controls.pool.step()
    engines[0].receive()
    controls.pool.step()
    controls.now_s = 159
    controls.pool.step()
    assert (controls.pool.num_engines, controls.pool.weight_version) == (3, 0)
    engines[1].receive()
    controls.pool.step()
    assert controls.pool.num_engines == 3, "most members have the version only now"
    controls.now_s = 161
    controls.pool.step()
    assert (controls.pool.num_engines, controls.pool.weight_version) == (2, 1)
    assert controls.pool.names == {"e0", "e1", "e2"}


def test_a_minority_with_a_version_does_not_wait_for_ever() -> None:
    """Two of three members get no weights, perhaps because the trainer cannot reach them."""
    controls = Controls(patience_s=30.0)
    engines = [controls.join() for _ in range(3)]
    controls.defer()
    controls.pool.adopt(1)
    engines[0].receive()
    controls.pool.step()
    controls.now_s = 59
    controls.pool.step()
    assert (controls.pool.num_engines, controls.pool.weight_version) == (3, 0)
    controls.now_s = 61
    controls.pool.step()
    assert (controls.pool.num_engines, controls.pool.weight_version) == (1, 1)
    engines[1].receive()
    controls.pool.step()
    assert controls.pool.num_engines == 2


def test_wishes_for_newer_versions_keep_the_age_of_the_oldest() -> None:
    """A version that is asked for every second must not hide that a member has not moved for long."""
    controls = Controls()
    late, other = controls.join(), controls.join()
    controls.defer()
    for version in range(1, 5):
        controls.pool.adopt(version)
        other.receive()
        controls.now_s += PATIENCE_S * 0.4
        controls.pool.step()
    assert controls.pool.num_engines == 1
    assert controls.pool.weight_version == 4
    assert late.wanted == 4


def test_lost_member_set_aside_returns_its_requests() -> None:
    controls = Controls()
    late, other = controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(0), request(4)])
    pool.step()
    controls.defer()
    pool.adopt(1)
    other.receive()
    pool.step()
    controls.now_s = PATIENCE_S * 1.5
    pool.step()
    late.is_lost = True
    pool.lose("e0", "it hangs")
    assert "e0 left: it hangs; 1 rollouts go on elsewhere" in controls.logged
    pool.step()
    assert sorted(other.running) == [0, 4]
    for completion in controls.drain().values():
        check(completion)


def test_pool_version_is_the_oldest_of_its_members() -> None:
    """A sequence with newer tokens waits until another member has weights that are new enough."""
    controls = Controls()
    first, second = controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(rollout_id) for rollout_id in (0, 4)])
    pool.step()
    controls.defer()
    pool.adopt(1)
    first.receive()
    pool.step()
    assert (first.weight_version, second.weight_version, pool.weight_version) == (1, 0, 0)
    first.is_lost = True
    pool.step()
    assert list(second.running) == [4], "a sequence with tokens of version 1 must not continue at version 0"
    assert len(pool.generated(RolloutId(0))) == 2
    second.receive()
    pool.step()
    assert (pool.weight_version, sorted(second.running)) == (1, [0, 4])
    for completion in controls.drain().values():
        check(completion)


def test_pool_version_stays_while_no_member_samples() -> None:
    controls = Controls()
    first = controls.join()
    controls.pool.adopt(3)
    controls.pool.step()
    controls.defer()
    controls.pool.adopt(4)
    controls.pool.lose("e0", "it hangs")
    assert (first.weight_version, controls.pool.weight_version) == (3, 3)
    second = controls.join()
    second.receive(2)
    controls.pool.step()
    assert controls.pool.weight_version == 3
    second.receive()
    controls.pool.step()
    assert (controls.pool.num_engines, controls.pool.weight_version) == (1, 4)


def test_new_requests_wait_for_an_update_of_an_idle_pool() -> None:
    """An idle pool behaves like an idle engine: all new tokens have the version asked for."""
    controls = Controls()
    engine = controls.join()
    controls.defer()
    controls.pool.adopt(1)
    controls.pool.add([request(0)])
    controls.pool.step()
    assert not engine.running
    engine.receive()
    (completion,) = controls.drain().values()
    assert set(completion.generated.weight_versions.tolist()) == {1}


def test_member_ahead_of_the_wish_gets_requests_last() -> None:
    """An evaluation is of one version: a server that has got a newer one already leaves the requests to the others."""
    controls = Controls()
    first, ahead = controls.join(), controls.join()
    ahead.receive(1)
    controls.pool.step()
    controls.pool.add([request(4 * index) for index in range(6)])
    assert (len(first.running), len(ahead.running)) == (6, 0)
    controls.pool.lose("e0", "it hangs")
    controls.pool.step()
    assert len(ahead.running) == 6, "better than to wait"
    for completion in controls.drain().values():
        check(completion)


def test_late_or_repeated_wishes_change_nothing() -> None:
    controls = Controls()
    engine = controls.join()
    asked = list[int]()
    adopt = engine.adopt
    engine.adopt = lambda version: (asked.append(version), adopt(version))[1]  # type: ignore[method-assign, func-returns-value]
    for version in (2, 2, 1, 3):
        controls.pool.adopt(version)
    assert asked == [2, 3]


def test_member_that_refuses_to_adopt_leaves() -> None:
    controls = Controls()
    _, second = controls.join(), controls.join()
    controls.pool.add([request(0)])
    second.refusal = GenerationError("it does not adopt version 1: the admin token is wrong")
    controls.pool.step()
    assert controls.pool.names == {"e0"}
    assert "e1 left: it does not adopt version 1: the admin token is wrong" in controls.logged


def test_error_of_an_update_reaches_the_caller_and_keeps_the_member() -> None:
    controls = Controls()
    engine = controls.join()
    controls.pool.add([request(0)])
    engine.refusal = NonFiniteWeightsError("x has NaN or infinite values")
    with pytest.raises(NonFiniteWeightsError, match="x has NaN"):
        controls.pool.step()
    assert (controls.pool.names, controls.pool.weight_version) == (frozenset({"e0"}), 0)
    check(controls.drain()[0])


def test_leaving_member_finishes_and_stopped_member_hands_over() -> None:
    controls = Controls()
    first, second = controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(0), request(4)])
    pool.step()
    pool.leave("e0", "its time is over")
    pool.leave("unknown", "")
    pool.add([request(8)])
    assert (list(first.running), list(second.running), pool.num_engines) == ([0], [4, 8], 1)
    pool.adopt(1)
    assert first.weight_version == 1, "a leaving member must still be asked to adopt new weights"
    third = controls.join()
    second.is_stopped = True
    pool.step()
    assert sorted(third.running) == [4, 8]
    assert [len(pool.generated(RolloutId(number))) for number in (0, 4)] == [2, 1]
    done = controls.drain()
    assert sorted(done) == [0, 4, 8]
    for completion in done.values():
        check(completion)
    assert set(controls.arrivals.counts.values()) == {1}
    assert pool.names == {"e2"}
    assert {"e0 left: its time is over", "e1 left: it was stopped"} <= set(controls.logged)


def test_stopped_engine_that_refuses_requests_still_hands_over() -> None:
    controls = Controls()
    first = controls.join()
    pool = controls.pool
    pool.add([request(0)])
    for _ in range(3):
        pool.step()
    first.is_stopped = True
    pool.add([request(1)])
    assert pool.names == {"e0"}
    assert not first.hung_up
    controls.join()
    assert pool.step() == []
    assert len(pool.generated(RolloutId(0))) == 3
    assert pool.names == {"e1"}
    assert "e0 left: connection refused" in controls.logged
    for completion in controls.drain().values():
        check(completion)


def test_refused_request_raises_or_drops_the_member() -> None:
    controls = Controls()
    first, second = controls.join(), controls.join()
    pool = controls.pool
    second.refuses = "its prompt is odd"
    with pytest.raises(RequestError, match="odd"):
        pool.add([request(0), request(4)])
    assert pool.num_in_flight == 0
    pool.add([request(1)])
    with pytest.raises(RequestError, match="request 1 is in flight already"):
        pool.add([request(1)])
    with pytest.raises(RequestError, match="twice"):
        pool.add([request(5), request(5)])
    first.is_lost = True  # the second member then refuses a request that the first one had accepted, and leaves
    pool.step()
    assert pool.names == frozenset()
    controls.join()
    check(controls.drain()[1])


def test_invalid_request_is_refused_without_members() -> None:
    def refuse(request: GenerationRequest) -> None:
        raise RequestError("too long")

    pool = EnginePool(0, hooks=PoolHooks(validate=refuse))
    with pytest.raises(RequestError, match="too long"):
        pool.add([request(0)])
    assert pool.num_in_flight == 0


def test_abort_covers_lost_members_and_waiting_requests() -> None:
    controls = Controls()
    _, second = controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(rollout_id) for rollout_id in range(8)])
    pool.step()
    second.is_lost = True

    def fail(rollout_ids: list[RolloutId]) -> list[Completion]:
        second.abort = abort  # type: ignore[method-assign]
        raise GenerationLostError("no answer")

    abort, second.abort = second.abort, fail  # type: ignore[method-assign]
    aborted = pool.abort([RolloutId(number) for number in (0, 4, 5, 77)])
    assert sorted((done.rollout_id, len(done.generated)) for done in aborted) == [(0, 1), (4, 1), (5, 1)]
    assert {done.finish_reason for done in aborted} == {FinishReason.ABORT}
    pool.add([replace(request(4), generated=aborted[1].generated)])
    assert sorted(controls.drain()) == [1, 2, 3, 4, 6, 7]
    pool.add([request(20)])
    pool.leave("e0", "")
    assert pool.num_in_flight == 1


def test_step_asks_only_members_with_news() -> None:
    news, asked = News(), list[str]()
    pool = EnginePool(0, run=run_in_background, news=news)

    class Watched(FakeEngine):
        name = ""

        def step(self) -> list[Completion]:
            asked.append(self.name)
            return []

    for index in range(20):
        engine = Watched(Arrivals())
        engine.name = str(index)
        pool.join(engine.name, engine)  # type: ignore[arg-type]
    pool.add([request(0)])
    pool.step()
    assert sorted(asked, key=int) == list(map(str, range(20))), "news of members that have just joined may be lost"
    asked.clear()
    news.notifier("7")()
    pool.step()
    assert asked == ["7"]


# Weighted so that the hardest case is frequent: an engine is lost while others have or receive newer weights.
KINDS = ["step"] * 6 + ["add"] * 4 + ["receive"] * 4 + ["finish"] + ["adopt"] * 3 + ["join"] * 2
KINDS += ["lose", "stop", "leave", "late", "abort"]


def test_later_turn_uses_weights_no_older_than_its_prompt() -> None:
    controls = Controls()
    updated, other = controls.join(), controls.join()
    controls.pool.add([request(40, 100)])
    controls.defer()
    controls.pool.adopt(1)
    updated.receive()
    controls.pool.step()
    controls.pool.add([replace(request(4 * index), first_position=3, prompt_version=1) for index in range(4)])
    assert set(map(int, updated.running)) >= {0, 4, 8, 12}
    assert not set(map(int, other.running)) & {0, 4, 8, 12}


actions = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1000)), min_size=20, max_size=80)


@pytest.mark.parametrize("is_remote", [False, True])
@given(steps=actions)
def test_every_request_completes_once_under_any_events(is_remote: bool, steps: list[tuple[str, int]]) -> None:
    controls = Controls(News() if is_remote else None, join_timeout_s=1e9)
    for chunk_tokens in (1, 2, 3):
        controls.join(chunk_tokens)
    controls.defer()
    pool, next_id, newest = controls.pool, 0, 0
    min_version: dict[int, int] = {}  # version of the pool when a request was added
    lengths: dict[int, int] = {}
    done: dict[int, Completion] = {}
    seen_version = 0

    def take(completions: list[Completion]) -> None:
        for completion in completions:
            assert completion.rollout_id not in done
            done[completion.rollout_id] = completion

    for action, number in steps:
        names = sorted(pool.names)
        engine = controls.engines[names[number % len(names)]] if names else None
        match action:
            case "join":
                controls.join(chunk_tokens=1 + number % 4)
            case "lose" if engine:
                engine.is_lost = True
            case "stop" if engine:
                engine.is_stopped = True
            case "leave" if engine:
                pool.leave(names[number % len(names)], "asked to")
            case "adopt":
                newest += 1
                pool.adopt(newest)
            case "receive" if engine:
                engine.receive(min(newest, engine.weight_version + number % 3))
            case "finish" if controls.recalls:
                controls.finish(number % len(controls.recalls))
            case "late":
                controls.now_s += 30
            case "add":
                lengths[next_id], min_version[next_id] = 1 + number % 12, pool.weight_version
                pool.add([request(next_id, lengths[next_id])])
                next_id += 1
            case "abort" if min_version:
                controls.finish_recalls()  # `abort` waits for recalls, so deferred ones must end first
                ids = [RolloutId(key) for key in min_version if key not in done and key % 2 == number % 2]
                recalls, controls.recalls = controls.recalls, None
                aborted = pool.abort(ids)
                controls.recalls = recalls
                for completion in aborted:
                    generated = completion.generated if len(completion.generated) else None
                    original = request(completion.rollout_id, lengths[completion.rollout_id])
                    pool.add([replace(original, generated=generated)])
            case "step":
                take(controls.step())
        assert pool.weight_version >= seen_version, "the version of the pool went down"
        seen_version = pool.weight_version
        assert pool.num_in_flight == next_id - len(done)
    controls.finish_recalls()
    controls.recalls, controls.hold_back = None, False
    controls.now_s += 1e6  # members without the newest weights are set aside
    controls.join()
    take(list(controls.drain().values()))
    assert sorted(done) == list(range(next_id))
    for rollout_id, completion in done.items():
        check(completion, lengths[rollout_id])
        assert completion.generated.weight_versions.min() >= min_version[rollout_id], "older than the pool's version"
    assert set(controls.arrivals.counts.values()) <= {1}, "a token that had arrived was generated again"
