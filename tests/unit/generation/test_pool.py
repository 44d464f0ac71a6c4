"""EnginePool: engines join, leave, are lost, stopped and updated at any time."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.concurrency.background import run_at_once, run_in_background
from midflight.errors import GenerationLostError, NonFiniteWeightsError, RequestError, WeightUpdateError
from midflight.generation.members import PATIENCE_S
from midflight.generation.placement import newest_version_of
from midflight.generation.pool import EnginePool, PoolHooks
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
    """Client of a simulated server: tokens arrive in chunks of `chunk_tokens`; the rest are lost with the server."""

    num_engines = 1
    update_pending = False

    def __init__(self, arrivals: Arrivals, chunk_tokens: int = 1) -> None:
        self.arrivals, self.chunk_tokens = arrivals, chunk_tokens
        self.weight_version: int | None = None
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
            assert self.weight_version is not None, "a request was added before the first weights"
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
        if self.is_stopped:
            return [self._take(rollout_id, FinishReason.ABORT) for rollout_id in list(self.running)]
        ended = []
        for rollout_id, (request, versions, _) in list(self.running.items()):
            assert self.weight_version is not None
            versions.append(self.weight_version)
            if len(versions) == request.sampling.max_tokens:
                ended.append(self._take(rollout_id, FinishReason.LENGTH))
        return ended

    def abort(self, rollout_ids: list[RolloutId]) -> list[Completion]:
        return [self._take(key, FinishReason.ABORT) for key in rollout_ids if key in self.running]

    def update_weights(self, version: int, weights: object) -> None:
        if self.is_lost:
            raise WeightUpdateError("the receiver is gone")
        self.weight_version = version

    def hang_up(self) -> None:
        self.hung_up = True

    def _take(self, rollout_id: RolloutId, reason: FinishReason) -> Completion:
        generated = self.generated(rollout_id) if self.is_lost else tokens_of(rollout_id, self.running[rollout_id][1])
        _, _, known = self.running.pop(rollout_id)
        self.arrivals.counts.update((rollout_id, position) for position in range(known, len(generated)))
        return Completion(rollout_id, generated, reason)


def tokens_of(rollout_id: int, versions: list[int]) -> GeneratedTokens:
    token_ids = [token(rollout_id, position) for position in range(len(versions))]
    return GeneratedTokens(
        np.array(token_ids, np.int32), np.zeros(len(versions), np.float32), np.array(versions, np.int32)
    )


def request(rollout_id: int, num_tokens: int = 8) -> GenerationRequest:
    prompt = np.array([rollout_id // 4, 1], np.int32)  # siblings in fours
    return GenerationRequest(RolloutId(rollout_id), prompt, SamplingParams(num_tokens), seed=0)


class Controls:
    """A pool with a clock and background calls that the test controls."""

    def __init__(self, **options: object) -> None:
        self.arrivals, self.now_s, self.logged = Arrivals(), 0.0, list[str]()
        self.deferred: list[tuple[Callable[[], None], Future[None]]] | None = None
        hooks = PoolHooks(log=self._log, left=self._log)
        self.pool = EnginePool(0, {}, run=self._run, hooks=hooks, clock=lambda: self.now_s, **options)  # type: ignore[arg-type]
        self.engines: dict[str, FakeEngine] = {}

    def join(self, chunk_tokens: int = 1) -> FakeEngine:
        name, engine = f"e{len(self.engines)}", FakeEngine(self.arrivals, chunk_tokens)
        self.engines[name] = engine
        self.pool.join(name, engine, engine.hang_up)  # type: ignore[arg-type]
        return engine

    def _log(self, name: str, text: str) -> None:
        self.logged.append(f"{name} {text}")

    def defer(self) -> None:
        """Hold back background calls from now on, until `finish`."""
        self.deferred = []

    def finish_recalls(self) -> None:
        """Run the deferred calls that take requests back from members that were set aside."""
        assert self.deferred is not None
        for index in reversed(range(len(self.deferred))):
            if isinstance(self.deferred[index][0], functools.partial):
                self.finish(index)

    def finish(self, index: int = 0) -> None:
        assert self.deferred is not None
        function, future = self.deferred.pop(index)
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def drain(self) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        while self.pool.num_in_flight:
            for completion in self.pool.step():
                assert completion.rollout_id not in done
                done[completion.rollout_id] = completion
        return done

    def _run(self, function):  # type: ignore[no-untyped-def]
        if self.deferred is None:
            return run_at_once(function)
        future: Future[None] = Future()
        self.deferred.append((function, future))
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
    controls.defer()
    controls.pool.update_weights(1, {})
    controls.now_s = 1000
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


def test_new_member_gets_newest_weights_before_requests() -> None:
    controls = Controls()
    controls.pool.update_weights(5, {})
    assert controls.pool.weight_version == 5
    controls.defer()
    engine = controls.join()
    controls.pool.add([request(0)])
    assert controls.pool.step() == []
    assert not engine.running
    controls.pool.update_weights(6, {})
    controls.finish()
    controls.pool.step()
    assert (engine.weight_version, list(engine.running)) == (5, []), "the member sampled with old weights"
    controls.finish()
    controls.pool.step()
    assert (engine.weight_version, list(engine.running)) == (6, [0])
    assert controls.logged[-1] == "e0 joined with weights of version 6"


def test_slow_joining_member_does_not_delay_updates() -> None:
    controls = Controls()
    first = controls.join()
    pool = controls.pool
    pool.add([request(0, num_tokens=20)])
    controls.defer()
    slow = controls.join()
    for version in (1, 2, 3):
        pool.update_weights(version, {})
        controls.finish(-1)
        pool.step()
        assert (pool.weight_version, pool.update_pending, first.weight_version) == (version, False, version)
    controls.finish()
    pool.step()
    assert (slow.weight_version, pool.num_engines, pool.weight_version) == (0, 1, 3)
    assert controls.logged[-1] == (
        "e1 gets no requests until it has caught up: it has version 0, and others sample with 3"
    )
    controls.finish()
    pool.step()
    assert (slow.weight_version, pool.num_engines, pool.weight_version) == (3, 2, 3)
    assert controls.logged[-1] == "e1 joined with weights of version 3"


def test_slow_member_receives_a_copy_of_its_weights() -> None:
    """The caller reuses its tensors for the next version, so a deferred transfer must send a copy."""
    controls, sent = Controls(), list[int]()
    buffer = {"weight": torch.ones(1)}
    controls.defer()
    engine = controls.join()
    engine.update_weights = lambda version, weights: sent.append(int(weights.get("weight", torch.zeros(1))))  # type: ignore[method-assign, attr-defined]
    controls.pool.update_weights(1, buffer)
    controls.finish()
    controls.pool.step()
    buffer["weight"].fill_(2)
    controls.finish()
    assert sent == [0, 1]


def test_slow_update_sets_a_member_aside_until_caught_up() -> None:
    controls = Controls(update_timeout_s=100.0)
    slow, other = controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(0), request(4)])
    pool.step()
    controls.defer()
    pool.update_weights(1, {})
    controls.finish(1)
    pool.step()
    assert (pool.update_pending, pool.weight_version) == (True, 0)
    controls.now_s = PATIENCE_S * 1.5
    pool.step()
    assert (pool.update_pending, pool.weight_version, pool.num_engines) == (False, 1, 1)
    assert list(slow.running) == [0], "the recall is deferred, so the requests must still be there"
    controls.finish_recalls()
    pool.step()
    assert sorted(other.running) == [0, 4]
    pool.update_weights(2, {})
    controls.finish(-1)
    pool.step()
    assert (pool.weight_version, slow.weight_version) == (2, 0)
    controls.finish()
    pool.step()
    assert (pool.num_engines, slow.weight_version) == (1, 1)
    controls.finish()
    pool.step()
    assert (pool.num_engines, slow.weight_version) == (2, 2)
    assert controls.logged[2:] == [
        "e0 gets no requests until it has caught up: it has version 0, and others sample with 1"
    ]
    done = controls.drain()
    for completion in done.values():
        check(completion)
    assert np.unique(done[0].generated.weight_versions).tolist() == [0, 2]


def test_lost_member_set_aside_returns_its_requests() -> None:
    controls = Controls(update_timeout_s=100.0)
    slow, other = controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(0), request(4)])
    pool.step()
    controls.defer()
    pool.update_weights(1, {})
    controls.finish(1)
    pool.step()
    controls.now_s = PATIENCE_S * 1.5
    pool.step()
    slow.is_lost = True
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
    pool.update_weights(1, {})
    controls.finish(0)
    pool.step()
    assert (first.weight_version, second.weight_version, pool.weight_version) == (1, 0, 0)
    assert pool.update_pending
    first.is_lost = True
    pool.step()
    assert list(second.running) == [4], "a sequence with tokens of version 1 must not continue at version 0"
    assert len(pool.generated(RolloutId(0))) == 2
    controls.finish(0)
    pool.step()
    assert (pool.weight_version, sorted(second.running)) == (1, [0, 4])
    for completion in controls.drain().values():
        check(completion)


def test_new_requests_wait_for_an_update_of_an_idle_pool() -> None:
    """An idle pool behaves like an idle engine, which adopts weights at once: all new tokens have one version."""
    controls = Controls()
    engine = controls.join()
    controls.defer()
    controls.pool.update_weights(1, {})
    controls.pool.add([request(0)])
    controls.pool.step()
    assert not engine.running
    controls.finish()
    (completion,) = controls.drain().values()
    assert set(completion.generated.weight_versions.tolist()) == {1}


def test_member_with_failed_or_late_update_leaves() -> None:
    controls = Controls(update_timeout_s=10.0)
    _, second, third = controls.join(), controls.join(), controls.join()
    pool = controls.pool
    pool.add([request(rollout_id) for rollout_id in range(12)])
    controls.defer()
    pool.update_weights(1, {})
    third.is_lost = True
    controls.finish(2)
    controls.finish(1)
    pool.step()
    assert pool.names == {"e0", "e1"}
    assert "e2 left: the receiver is gone; 4 rollouts go on elsewhere" in controls.logged
    controls.now_s = 11
    pool.step()
    assert pool.names == {"e1"}
    assert not pool.update_pending
    assert "e0 left: it did not take version 1 in 10 s; 8 rollouts go on elsewhere" in controls.logged
    assert len(second.running) == 12
    assert len(controls.drain()) == 12


def test_non_finite_weights_raise_and_keep_the_member() -> None:
    """Every member would refuse these weights, so replacing the member and retrying would never end."""
    controls = Controls()
    engine = controls.join()
    controls.pool.add([request(0)])

    def refuse(version: int, weights: object) -> None:
        raise NonFiniteWeightsError("x has NaN or infinite values")

    engine.update_weights = refuse  # type: ignore[method-assign]
    with pytest.raises(NonFiniteWeightsError, match="x has NaN"):
        controls.pool.update_weights(3, {})
    assert (controls.pool.names, controls.pool.weight_version) == (frozenset({"e0"}), 0)
    with pytest.raises(WeightUpdateError, match="version 2 is older than version 3, which was sent"):
        controls.pool.update_weights(2, {})


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
    pool.update_weights(1, {})
    assert first.weight_version == 1, "a leaving member must still get new weights"
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

    pool = EnginePool(0, {}, hooks=PoolHooks(validate=refuse))
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


def test_step_waits_once_for_many_remote_members() -> None:
    """All members set one event, so that a single wait covers them and no event is lost."""
    ended = threading.Event()
    pool = EnginePool(0, {}, run=run_in_background, ended=ended)
    engines = [FakeEngine(Arrivals()) for _ in range(20)]
    waits = list[float]()

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            return True

    pool._ended = Watched()
    for index, engine in enumerate(engines):
        pool.join(str(index), engine)  # type: ignore[arg-type]
    assert pool.wait_for_member(60)
    while pool.update_pending:
        pool.step()
    waits.clear()
    pool.add([request(0)])
    assert pool.step() == []
    assert len(waits) == 1


# Weighted so that the hardest case is frequent: an engine is lost while others have or receive newer weights.
KINDS = ["step"] * 6 + ["add"] * 4 + ["finish"] * 4 + ["update"] * 3 + ["join"] * 2
KINDS += ["lose", "stop", "leave", "late", "abort"]


def test_later_turn_uses_weights_no_older_than_its_prompt() -> None:
    controls = Controls(update_timeout_s=1e9)
    engines = [controls.join() for _ in range(2)]
    controls.pool.add([request(40, 100)])
    controls.defer()
    controls.pool.update_weights(1, {})
    controls.finish()
    controls.pool.step()
    controls.pool.add([replace(request(4 * index), first_position=3, prompt_version=1) for index in range(4)])
    updated, other = sorted(engines, key=lambda engine: -(engine.weight_version or 0))
    assert set(map(int, updated.running)) >= {0, 4, 8, 12}
    assert not set(map(int, other.running)) & {0, 4, 8, 12}


actions = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1000)), min_size=20, max_size=80)


@given(actions)
def test_every_request_completes_once_under_any_events(steps: list[tuple[str, int]]) -> None:
    controls = Controls(update_timeout_s=50.0, join_timeout_s=1e9)
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
            case "update" if not pool.update_pending:
                newest += 1
                pool.update_weights(newest, {})
            case "finish" if controls.deferred:
                controls.finish(number % len(controls.deferred))
            case "late":
                controls.now_s += 30
            case "add":
                lengths[next_id], min_version[next_id] = 1 + number % 12, pool.weight_version
                pool.add([request(next_id, lengths[next_id])])
                next_id += 1
            case "abort" if min_version:
                controls.finish_recalls()  # `abort` waits for recalls, so deferred ones must end first
                ids = [RolloutId(key) for key in min_version if key not in done and key % 2 == number % 2]
                deferred, controls.deferred = controls.deferred, None
                aborted = pool.abort(ids)
                controls.deferred = deferred
                for completion in aborted:
                    generated = completion.generated if len(completion.generated) else None
                    original = request(completion.rollout_id, lengths[completion.rollout_id])
                    pool.add([replace(original, generated=generated)])
            case "step":
                take(pool.step())
        assert pool.weight_version >= seen_version, "the version of the pool went down"
        seen_version = pool.weight_version
        assert pool.num_in_flight == next_id - len(done)
    controls.finish_recalls()
    controls.deferred = None
    controls.now_s += 100  # past the update timeout: members without the new weights leave
    controls.join()
    take(list(controls.drain().values()))
    assert sorted(done) == list(range(next_id))
    for rollout_id, completion in done.items():
        check(completion, lengths[rollout_id])
        assert completion.generated.weight_versions.min() >= min_version[rollout_id], "older than the pool's version"
    assert set(controls.arrivals.counts.values()) <= {1}, "a token that had arrived was generated again"
