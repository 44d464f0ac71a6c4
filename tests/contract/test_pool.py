"""Contract of a pool, with one engine in process and with several behind HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from contract.generating import LONG, drain, requests
from contract.weight_sending import incoming
from midflight.concurrency.background import run_in_background
from midflight.errors import RequestError
from midflight.generation import members
from midflight.generation.client import HTTPGenerator
from midflight.generation.news import News
from midflight.generation.pool import EnginePool, PoolHooks
from midflight.models.loading import weights_of
from midflight.protocols import IncomingWeights
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId

if TYPE_CHECKING:
    from contract.conftest import Server, StartServer

OLD, NEW = weights_of(tiny_model()), weights_of(tiny_model(seed=1))
LINEAGE = "run"


class Fleet:
    """A pool and the engines that weights are staged in."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.stage: list[Callable[[IncomingWeights], object]] = []

    def update(self, version: int) -> list[Completion]:
        """Let all engines adopt new weights; return the completions until the pool samples with them."""
        for stage in self.stage:
            stage(incoming(version, NEW, LINEAGE))
        return adopt(self.pool, version)


def adopt(pool: EnginePool, version: int) -> list[Completion]:
    completions: list[Completion] = []
    pool.adopt(version)
    while pool.weight_version < version:
        completions += pool.step()
    return completions


def fleet_of_one() -> Fleet:
    engine, pool = tiny_engine(tiny_model()), EnginePool(0)
    pool.join("embedded", engine)
    fleet = Fleet(pool)
    fleet.stage.append(engine.stage)
    return fleet


def check_prompt(request: GenerationRequest) -> None:
    """Check what the servers would refuse, as a run does: servers answer after `add` has returned."""
    if not len(request.prompt_token_ids):
        raise RequestError("a prompt has 0 tokens, not 1 to 32")


@pytest.fixture(params=["embedded", "http"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    if request.param == "embedded":
        yield fleet_of_one()
        return
    start_server = request.getfixturevalue("start_server")
    news = News()
    fleet = Fleet(EnginePool(0, run=run_in_background, news=news, hooks=PoolHooks(validate=check_prompt)))
    for name in ("one", "two", "three"):
        server = started(start_server)
        join(fleet.pool, name, server.url, news)
        fleet.stage.append(server.driver.stage)
    while fleet.pool.num_engines < 3:
        fleet.pool.step()
    yield fleet
    fleet.pool.close()


@pytest.fixture
def pool(fleet: Fleet) -> EnginePool:
    return fleet.pool


def started(start_server: StartServer) -> Server:
    """Start a server with weights of the run, version 0."""
    server = start_server()
    server.driver.stage(incoming(0, OLD, LINEAGE))
    server.driver.adopt(LINEAGE, 0).result()
    return server


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


def test_a_server_that_refuses_a_request_leaves(start_server: StartServer, notes: Notes) -> None:
    """A request that passed the run's own checks is refused only by a server that does not fit the run."""
    news = News()
    with closing(EnginePool(0, run=run_in_background, news=news, hooks=notes.hooks)) as pool:
        join(pool, "one", started(start_server).url, news)
        pool.add([*requests(1), replace(requests(1, first=1)[0], prompt_token_ids=np.zeros(0, np.int32))])
        while pool.names:
            pool.step()
        assert pool.num_in_flight == 2
        assert notes.said[-1].endswith("2 rollouts go on elsewhere")
        assert "0 tokens, not 1 to 32" in notes.said[-1]


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


def test_update_keeps_requests_in_flight(fleet: Fleet) -> None:
    pool = fleet.pool
    pool.add(requests(4, LONG))
    done = fleet.update(3)
    assert pool.weight_version == 3
    assert len(done) + len(drain(pool)) == 4
    (fresh,) = requests(1, LONG, first=90)
    pool.add([fresh])
    engine = tiny_engine(tiny_model(seed=1), version=3)
    engine.add([fresh])
    (completion,), (expected,) = drain(pool).values(), drain(engine).values()
    assert_same(completion, expected)
    assert set(completion.generated.weight_versions.tolist()) == {3}


def test_embedded_update_matches_the_engine_token_by_token() -> None:
    fleet, engine = fleet_of_one(), tiny_engine(tiny_model())
    pool = fleet.pool
    for generator, stage in ((pool, fleet.stage[0]), (engine, engine.stage)):
        generator.add(requests(3, LONG))
        generator.step()
        generator.adopt(1)
        generator.step()
        stage(incoming(1, NEW, LINEAGE))
    while engine.num_in_flight:
        assert pool.weight_version == engine.weight_version
        ours, theirs = pool.step(), engine.step()
        assert [each.generated.weight_versions.tolist() for each in ours] == [
            each.generated.weight_versions.tolist() for each in theirs
        ]
    assert not pool.num_in_flight


def join(pool: EnginePool, name: str, url: str, news: News) -> None:
    server = HTTPGenerator(url, chunk_tokens=1, notify=news.notifier(name), lineage=LINEAGE)
    pool.join(name, server, server.close)


def test_joiner_without_weights_delays_no_update(start_server: StartServer, notes: Notes) -> None:
    """A server that the trainer cannot reach keeps its old weights: it gets no requests, and nobody waits for it."""
    news = News()
    good, other = started(start_server), start_server()
    with closing(EnginePool(0, run=run_in_background, news=news, hooks=notes.hooks)) as pool:
        join(pool, "good", good.url, news)
        while not pool.wait_for_member():
            pass
        join(pool, "other", other.url, news)
        pool.add(requests(4, LONG))
        done = 0
        for version in (1, 2, 3):
            good.driver.stage(incoming(version, NEW, LINEAGE))
            done += len(adopt(pool, version))
        assert done + len(drain(pool)) == 4
        assert pool.names == {"good", "other"}
        assert notes.said == ["good joined with weights of version 0"]
        other.driver.stage(incoming(3, NEW, LINEAGE))
        while pool.num_engines < 2:
            pool.step()
        assert notes.said[1:] == ["other joined with weights of version 3"]


def test_late_server_is_set_aside_until_it_has_caught_up(
    start_server: StartServer, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rollouts continue on the other server with their tokens, until the late one has the newest weights."""
    monkeypatch.setattr(members, "PATIENCE_S", 0.1)
    news = News()
    good, late = started(start_server), started(start_server)
    with closing(EnginePool(0, run=run_in_background, news=news, hooks=notes.hooks)) as pool:
        join(pool, "good", good.url, news)
        join(pool, "late", late.url, news)
        while pool.num_engines < 2:
            pool.step()
        late.http.post("/pause")
        pool.add(requests(12, LONG))
        done: list[Completion] = []
        for version in (1, 2):
            good.driver.stage(incoming(version, NEW, LINEAGE))
            done += adopt(pool, version)
            assert pool.num_engines == 1
        done += drain(pool).values()
        assert len(done) == 12
        assert all((np.diff(each.generated.weight_versions) >= 0).all() for each in done)
        late.http.post("/resume")
        late.driver.stage(incoming(2, NEW, LINEAGE))
        while pool.num_engines < 2:
            pool.step()
        assert late.driver.active.version == 2
    assert notes.said[2:] == [
        "late gets no requests until it has caught up: it has version 0, and others sample with 1"
    ]
