"""Contract of a pool, with one engine in process and with several behind HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contract.generating import LONG, drain, requests
from midflight.concurrency.background import run_in_background
from midflight.errors import RequestError
from midflight.generation import members
from midflight.generation.client import HTTPGenerator
from midflight.generation.pool import EnginePool, PoolHooks
from midflight.models.loading import weights_of
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, RolloutId

OLD, NEW = weights_of(tiny_model()), weights_of(tiny_model(seed=1))


def pool_of_one() -> EnginePool:
    pool = EnginePool(0, OLD)
    pool.join("embedded", tiny_engine(tiny_model(), max_update_pause_s=1e-9))
    while not pool.wait_for_member():
        pass
    return pool


@pytest.fixture(params=["embedded", "http"])
def pool(request: pytest.FixtureRequest) -> Iterator[EnginePool]:
    if request.param == "embedded":
        yield pool_of_one()
        return
    start_server = request.getfixturevalue("start_server")
    ended = threading.Event()
    pool = EnginePool(0, OLD, run=run_in_background, ended=ended)
    for name in ("one", "two", "three"):
        join(pool, name, start_server().url, ended)
    while pool.num_engines < 3:
        pool.step()
    yield pool
    pool.close()


class Notes:
    """Log lines of a pool about its members."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.hooks = PoolHooks(log=self._say, left=self._say)

    def _say(self, name: str, text: str) -> None:
        self.said.append(f"{name} {text}")


@pytest.fixture
def notes() -> Notes:
    return Notes()


def assert_same(one: Completion, other: Completion) -> None:
    """Compare completions; log-probabilities may differ by rounding, because batch sizes differ."""
    assert one.finish_reason is other.finish_reason
    assert one.generated.token_ids.tolist() == other.generated.token_ids.tolist()
    np.testing.assert_allclose(one.generated.logprobs, other.generated.logprobs, atol=1e-5)


def test_completions_match_one_engine(pool: EnginePool) -> None:
    engine = tiny_engine(tiny_model())
    for generator in (engine, pool):
        generator.add(requests(20))
        assert generator.num_in_flight == 20
    expected, completions = drain(engine), drain(pool)
    assert completions.keys() == expected.keys()
    for rollout_id, completion in completions.items():
        assert_same(completion, expected[rollout_id])
    assert pool.step() == []


def test_an_invalid_request_refuses_the_whole_call(pool: EnginePool) -> None:
    bad = replace(requests(1)[0], prompt_token_ids=np.zeros(0, np.int32))
    with pytest.raises(RequestError, match="0 tokens, not 1 to 32"):
        pool.add([*requests(2, first=5), bad])
    assert pool.num_in_flight == 0
    assert pool.names
    with pytest.raises(KeyError):
        pool.generated(RolloutId(5))


def test_resumed_requests_match_uninterrupted_ones(pool: EnginePool) -> None:
    engine = tiny_engine(tiny_model())
    engine.add(requests(6, LONG))
    expected = drain(engine)
    pool.add(requests(6, LONG))
    ended: list[Completion] = []
    while not ended and len(pool.generated(RolloutId(0))) < 4:
        ended += pool.step()
    partial = pool.abort([RolloutId(each) for each in range(6)])
    ended += drain(pool).values()
    # A remote engine runs ahead of its client, so every request may have ended already.
    assert {each.finish_reason for each in partial} <= {FinishReason.ABORT}
    by_id = {each.rollout_id: each for each in requests(6, LONG)}
    for each in partial:
        start = expected[each.rollout_id].generated.token_ids[: len(each.generated)]
        assert each.generated.token_ids.tolist() == start.tolist()
        pool.add([replace(by_id[each.rollout_id], generated=each.generated if len(each.generated) else None)])
    completions = drain(pool) | {each.rollout_id: each for each in ended}
    assert completions.keys() == expected.keys()
    for rollout_id, completion in completions.items():
        assert_same(completion, expected[rollout_id])


def test_update_keeps_requests_in_flight(pool: EnginePool) -> None:
    pool.add(requests(4, LONG))
    pool.update_weights(3, NEW)
    while pool.update_pending:
        pool.step()
    assert pool.weight_version == 3
    drain(pool)
    (fresh,) = requests(1, LONG, first=90)
    pool.add([fresh])
    engine = tiny_engine(tiny_model(seed=1), version=3)
    engine.add([fresh])
    (completion,), (expected,) = drain(pool).values(), drain(engine).values()
    assert_same(completion, expected)
    assert set(completion.generated.weight_versions.tolist()) == {3}


def test_embedded_update_matches_the_engine_token_by_token() -> None:
    """The weights are copied in slices between tokens."""
    pool, engine = pool_of_one(), tiny_engine(tiny_model(), max_update_pause_s=1e-9)
    for generator in (pool, engine):
        generator.add(requests(3, LONG))
        generator.step()
        generator.update_weights(1, NEW)
    num_pending = 0
    while engine.num_in_flight:
        assert pool.update_pending == engine.update_pending
        assert pool.weight_version == engine.weight_version
        num_pending += engine.update_pending
        ours, theirs = pool.step(), engine.step()
        assert [each.generated.weight_versions.tolist() for each in ours] == [
            each.generated.weight_versions.tolist() for each in theirs
        ]
    assert num_pending > 1
    assert not pool.num_in_flight


@contextmanager
def blocked(running: Any, app: Any, path: str) -> Iterator[tuple[str, threading.Event]]:
    """Serve the application at another URL; requests to `path` wait until the event is set."""
    free = threading.Event()

    async def blocked_app(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == path:
            await asyncio.to_thread(free.wait)
        await app(scope, receive, send)

    with running(blocked_app) as url:
        try:
            yield url, free
        finally:
            free.set()


def join(pool: EnginePool, name: str, url: str, ended: threading.Event) -> None:
    server = HTTPGenerator(url, chunk_tokens=1, ended=ended)
    pool.join(name, server, server.close)


def update(pool: EnginePool, version: int) -> list[Completion]:
    completions: list[Completion] = []
    pool.update_weights(version, NEW)
    while pool.update_pending:
        completions += pool.step()
    return completions


def test_an_unreachable_joiner_delays_no_update(start_server: Any, running: Any, notes: Notes) -> None:
    ended = threading.Event()
    with (
        closing(EnginePool(0, OLD, run=run_in_background, ended=ended, hooks=notes.hooks)) as pool,
        blocked(running, start_server().app, "/init_process_group") as (unreachable, _),
    ):
        join(pool, "good", start_server().url, ended)
        while not pool.wait_for_member():
            pass
        join(pool, "unreachable", unreachable, ended)
        pool.add(requests(4, LONG))
        done = 0
        for version in (1, 2, 3):
            done += len(update(pool, version))
            assert pool.weight_version == version
        assert done + len(drain(pool)) == 4
        assert pool.names == {"good", "unreachable"}
        assert notes.said == ["good joined with weights of version 0"]


def test_a_server_slow_to_update_is_set_aside(
    start_server: Any, running: Any, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rollouts continue on the other server with their tokens, until the slow one has the newest weights."""
    monkeypatch.setattr(members, "PATIENCE_S", 0.1)
    ended = threading.Event()
    server = start_server()
    with (
        closing(EnginePool(0, OLD, run=run_in_background, ended=ended, hooks=notes.hooks)) as pool,
        blocked(running, server.app, "/request_weight_update") as (url, free),
    ):
        free.set()
        join(pool, "good", start_server().url, ended)
        join(pool, "slow", url, ended)
        while pool.num_engines < 2:
            pool.step()
        free.clear()
        server.http.post("/pause")
        pool.add(requests(12, LONG))
        done: list[Completion] = []
        for version in (1, 2):
            done += update(pool, version)
            assert (pool.weight_version, pool.num_engines) == (version, 1)
        done += drain(pool).values()
        assert len(done) == 12
        assert all((np.diff(each.generated.weight_versions) >= 0).all() for each in done)
        server.http.post("/resume")
        free.set()
        while pool.num_engines < 2:
            pool.step()
        assert server.driver.weight_version == 2
    assert notes.said[2:4] == [
        "slow gets no requests until it has caught up: it has version 0, and others sample with 1"
    ]
