"""Generator behind HTTP compared with an engine in process, adoption of new weights included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from contract.generating import LONG, drain, requests
from contract.weight_sending import incoming
from midflight.errors import GenerationError, GenerationLostError, ModelError, RequestError
from midflight.generation import adoption
from midflight.generation.client import HTTPGenerator
from midflight.models.loading import weights_of
from midflight.protocols import NO_VERSION, Generator
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, RolloutId, SamplingParams, WeightLabel

if TYPE_CHECKING:
    from contract.conftest import RunApp, Server, StartServer

OLD, NEW = weights_of(tiny_model()), weights_of(tiny_model(seed=1))


@pytest.fixture
def client(server: Server) -> Iterator[HTTPGenerator]:
    with HTTPGenerator(server.url, timeout_s=30) as client:
        yield client


def assert_same(one: Completion, other: Completion, rounding: float = 0.0) -> None:
    """Compare completions.

    `rounding`: tolerance for log-probabilities of engines with different batches or cached prefixes (nats).
    """
    assert one.finish_reason is other.finish_reason
    for name in ("token_ids", "logprobs", "weight_versions"):
        ours, theirs = getattr(one.generated, name), getattr(other.generated, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rounding if name == "logprobs" else 0)


def test_completions_match_the_engine(server: Server, client: HTTPGenerator) -> None:
    """Bit for bit: the server is paused while requests are added, so both engines form the same batches."""
    engine = tiny_engine(tiny_model())
    engine.add(requests(20))
    server.http.post("/pause")
    for request in requests(20):
        client.add([request])
    assert client.num_in_flight == 20
    assert client.step() == []
    server.http.post("/resume")
    expected, completions = drain(engine), drain(client)
    assert completions.keys() == expected.keys()
    for rollout_id, completion in completions.items():
        assert_same(completion, expected[rollout_id])
    assert {completion.finish_reason for completion in completions.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert client.step() == []


def test_later_turns_match_the_engine(server: Server, client: HTTPGenerator) -> None:
    """The prompt of a later turn may be longer than max_prompt_tokens."""
    prompt = np.arange(40, dtype=np.int32)
    later = [replace(each, prompt_token_ids=prompt, first_position=9) for each in requests(6, SamplingParams(12))]
    engine = tiny_engine(tiny_model())
    engine.add(later)
    server.http.post("/pause")
    client.add(later)
    server.http.post("/resume")
    expected, completions = drain(engine), drain(client)
    for rollout_id, completion in completions.items():
        assert_same(completion, expected[rollout_id], rounding=1e-5)
    with pytest.raises(RequestError, match="its prompt has 40 tokens, not 1 to 32"):
        client.add([replace(later[0], first_position=0)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": np.zeros(0, np.int32)}, "0 tokens, not 1 to 32"),
        ({"prompt_token_ids": np.array([44], np.int32)}, "token ids outside 0 to 43"),
        ({"sampling": SamplingParams(25)}, "max_tokens is 25"),
        ({"sampling": SamplingParams(4, temperature=-1.0)}, "temperature"),
        ({"rollout_id": RolloutId(0)}, "request 0 is in flight already"),
        ({"score_prompt": True}, "with echo, not as rollouts"),
    ],
)
def test_an_invalid_request_refuses_the_whole_call(
    server: Server, client: HTTPGenerator, change: dict[str, object], message: str
) -> None:
    server.http.post("/pause")
    good, last = requests(2)
    client.add([good])
    bad = replace(last, **change)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        client.add([*requests(2, first=5), bad])
    assert client.num_in_flight == 1
    server.http.post("/resume")
    assert drain(client).keys() == {0}
    while server.driver.num_in_flight:  # the two valid requests were accepted first and are aborted
        server.driver.abort([]).result()


class Limited:
    """Generator that takes `num_steps` steps; further steps do nothing."""

    def __init__(self, generator: Generator, num_steps: int) -> None:
        self._generator, self.num_steps = generator, num_steps

    def __getattr__(self, name: str) -> object:
        return getattr(self._generator, name)

    def step(self) -> list[Completion]:
        if not self.num_steps:
            return []
        self.num_steps -= 1
        return self._generator.step()


def wait_for_tokens(client: HTTPGenerator, rollout_id: int, num_tokens: int) -> None:
    while len(client.generated(RolloutId(rollout_id))) < num_tokens:
        assert client.step() == []


def test_aborted_requests_can_be_resumed(start_server: StartServer) -> None:
    engine = tiny_engine(tiny_model())
    (request,) = requests(1, LONG)
    engine.add([request])
    (whole,) = drain(engine).values()
    limited = Limited(tiny_engine(tiny_model()), num_steps=3)
    with HTTPGenerator(start_server(limited).url, chunk_tokens=1) as client:
        client.add([request])
        wait_for_tokens(client, 0, 3)
        partly = client.generated(RolloutId(0), start=1)
        assert partly.token_ids.tolist() == whole.generated.token_ids[1:3].tolist()
        (partial,) = client.abort([RolloutId(0), RolloutId(77)])
        assert partial.finish_reason is FinishReason.ABORT
        assert partial.generated.token_ids.tolist() == whole.generated.token_ids[:3].tolist()
        assert client.num_in_flight == 0
        with pytest.raises(KeyError):
            client.generated(RolloutId(0))
        limited.num_steps = 1000
        client.add([replace(request, generated=partial.generated)])
        (resumed,) = drain(client).values()
    assert resumed.generated.token_ids.tolist() == whole.generated.token_ids.tolist()
    assert resumed.generated.logprobs[:3].tolist() == whole.generated.logprobs[:3].tolist()


def test_resumed_tokens_survive_the_loss_of_the_server(start_server: StartServer) -> None:
    """The client keeps the tokens even before the server has repeated them."""
    engine = tiny_engine(tiny_model())
    (request,) = requests(1, LONG)
    engine.add([request])
    (whole,) = drain(engine).values()
    resumed = replace(request, generated=whole.generated.part(0, 7))
    limited = Limited(tiny_engine(tiny_model()), num_steps=0)
    with HTTPGenerator(start_server(limited).url, chunk_tokens=1) as client:
        client.add([resumed])
        assert client.generated(RolloutId(0)).token_ids.tolist() == whole.generated.token_ids[:7].tolist()
        limited.num_steps = 2
        wait_for_tokens(client, 0, 9)
        client.close()
        (partial,) = client.abort([RolloutId(0)])
        assert partial.generated.token_ids.tolist() == whole.generated.token_ids[:9].tolist()
        assert partial.generated.logprobs[:7].tolist() == whole.generated.logprobs[:7].tolist()
        assert len(partial.generated.logprobs) == len(partial.generated.weight_versions) == 9


def test_one_event_waits_for_several_clients(start_server: StartServer) -> None:
    ended = threading.Event()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(HTTPGenerator(start_server().url, notify=ended.set, chunk_tokens=24)) for _ in range(2)
        ]
        for client in clients:
            client.add(requests(1))
        completions: list[Completion] = []
        while len(completions) < 2:
            assert ended.wait(60)
            ended.clear()
            completions += [completion for client in clients for completion in client.step()]
        assert [client.step() for client in clients] == [[], []]


def test_restarted_server_with_old_weights_is_refused(start_server: StartServer) -> None:
    server = start_server()
    server.driver.stage(incoming(3, NEW, "run"))
    server.driver.adopt("run", 3).result()
    with HTTPGenerator(server.url, lineage="run") as client:
        assert client.weight_version == 3
        server.driver.active = WeightLabel(2, 2, "run")  # as after a restart
        with pytest.raises(
            GenerationError, match="version 3 of the weights 'run' is needed, and the server has version 2"
        ):
            client.add(requests(1))
        server.driver.active = WeightLabel(4, 4)
        with pytest.raises(GenerationError, match=r"version 3 of the weights 'run' is needed, .* version 4 of ''"):
            client.add(requests(1))
        assert client.num_in_flight == 0
        server.driver.active = WeightLabel(4, 4, "run")
        client.add(requests(1))
        drain(client)


def test_limits_of_the_server(client: HTTPGenerator) -> None:
    limits = client.limits()
    assert (limits.vocab_size, limits.max_length, limits.max_choices) == (VOCAB_SIZE, 32 + 24, 16)


def test_abort_while_paused_returns_waiting_requests(server: Server, client: HTTPGenerator) -> None:
    server.http.post("/pause")
    client.add(requests(10))
    aborted = client.abort([RolloutId(each) for each in range(10)])
    assert [len(each.generated) for each in aborted] == [0] * 10
    server.http.post("/resume")
    assert server.driver.num_in_flight == 0


def wait_for_version(client: HTTPGenerator, version: int) -> list[Completion]:
    completions: list[Completion] = []
    while client.weight_version < version:
        completions += client.step()
    return completions


def test_adopted_weights_keep_requests_in_flight(start_server: StartServer) -> None:
    """`adopt` returns at once; the version is a field that follows when the weights have arrived."""
    server = start_server()
    with HTTPGenerator(server.url, chunk_tokens=1, lineage="run") as client:
        assert client.weight_version == NO_VERSION, "the weights of the server are of another lineage"
        client.adopt(3)
        assert client.weight_version == NO_VERSION
        server.driver.stage(incoming(3, OLD, "run"))
        wait_for_version(client, 3)
        client.add(requests(4, LONG))
        server.driver.stage(incoming(4, NEW, "run"))
        client.adopt(4)
        completions = {each.rollout_id: each for each in wait_for_version(client, 4)} | drain(client)
        assert sorted(completions) == [0, 1, 2, 3]
        assert {int(each.generated.weight_versions.min()) for each in completions.values()} <= {3, 4}
        (fresh,) = requests(1, LONG, first=90)
        client.add([fresh])
        engine = tiny_engine(tiny_model(seed=1), version=4)
        engine.add([fresh])
        assert_same(drain(client)[90], drain(engine)[90], rounding=1e-5)


def test_newer_wish_replaces_an_older_one(start_server: StartServer) -> None:
    server = start_server()
    with HTTPGenerator(server.url) as client:
        for version in (1, 2, 3, 3, 2):
            client.adopt(version)
        server.driver.stage(incoming(2, NEW))
        wait_for_version(client, 2)
        server.driver.stage(incoming(3, NEW))
        wait_for_version(client, 3)


def test_wish_survives_lost_connections(
    start_server: StartServer, running: RunApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "RETRY_S", 0.01)
    server, num_lost = start_server(), 0

    async def losing(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_lost
        if scope["type"] == "lifespan":
            return
        if scope["path"] == "/adopt" and num_lost < 3:
            num_lost += 1
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            return  # the connection is closed in the middle of the answer
        await server.app(scope, receive, send)

    with running(losing) as url, HTTPGenerator(url) as client:
        client.adopt(1)
        server.driver.stage(incoming(1, NEW))
        wait_for_version(client, 1)
    assert num_lost == 3


def test_event_tells_that_weights_were_adopted(start_server: StartServer) -> None:
    server, ended = start_server(), threading.Event()
    with HTTPGenerator(server.url, notify=ended.set) as client:
        client.adopt(1)
        server.driver.stage(incoming(1, NEW))
        assert ended.wait(60)
        assert client.weight_version == 1


def test_server_with_another_protocol_is_refused(running: RunApp) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"status": "ok", "protocol": 9}'})

    with running(app) as url, pytest.raises(ModelError, match="follows version 9 of the protocol, and this client"):
        HTTPGenerator(url)


def test_update_in_flight_matches_the_engine(start_server: StartServer) -> None:
    """Tokens and log-probabilities match an engine that is updated after the same number of steps."""
    expected, engine = tiny_engine(tiny_model()), tiny_engine(tiny_model())
    limited = Limited(engine, num_steps=5)
    server = start_server(limited)
    with HTTPGenerator(server.url, chunk_tokens=1) as client:
        client.add(requests(1, LONG))
        expected.add(requests(1, LONG))
        wait_for_tokens(client, 0, 5)
        for _ in range(5):
            expected.step()
        expected.stage(incoming(2, NEW))
        expected.adopt(2)
        server.driver.stage(incoming(2, NEW))
        adopted = server.driver.adopt("", 2)
        server.driver.abort([]).result()  # the command before this one has been executed then
        limited.num_steps = 1000
        assert adopted.result().version == 2
        (completion,) = drain(client).values()
    assert completion.generated.weight_versions.tolist() == [0] * 5 + [2] * 19
    assert_same(completion, drain(expected)[0])


def test_a_url_without_server_is_an_error() -> None:
    with pytest.raises(GenerationLostError, match=r"127\.0\.0\.1:9/health"):
        HTTPGenerator("http://127.0.0.1:9")
