"""Generator behind HTTP compared with an engine in process, weight updates included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
import torch

from contract.generating import LONG, drain, requests
from midflight.errors import GenerationError, GenerationLostError, RequestError, WeightUpdateError
from midflight.generation.client import HTTPGenerator
from midflight.models.loading import weights_of
from midflight.protocols import Generator
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, RolloutId, SamplingParams

if TYPE_CHECKING:
    from contract.conftest import Server, StartServer


@pytest.fixture
def client(server: Server) -> Iterator[HTTPGenerator]:
    with HTTPGenerator(server.url, timeout_s=30, bucket_bytes=4096) as client:
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
        ({"prompt_token_ids": np.array([44], np.int32)}, "token id 44"),
        ({"sampling": SamplingParams(25)}, "max_tokens is 25"),
        ({"sampling": SamplingParams(4, temperature=-1.0)}, "temperature"),
        ({"rollout_id": RolloutId(0)}, "rollout 0 is in flight already"),
        ({"score_prompt": True}, "stream: not with echo"),
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
            stack.enter_context(HTTPGenerator(start_server().url, ended=ended, chunk_tokens=24)) for _ in range(2)
        ]
        for client in clients:
            client.add(requests(1))
        completions: list[Completion] = []
        while len(completions) < 2:
            assert ended.wait(60)
            ended.clear()
            completions += [completion for client in clients for completion in client.step()]
        assert [client.step() for client in clients] == [[], []]


def test_a_restarted_server_with_old_weights_is_refused(start_server: StartServer) -> None:
    first = start_server()
    with HTTPGenerator(first.url) as client:
        client.update_weights(3, weights_of(tiny_model(seed=1)))
        first.driver.weight_version = 0  # as after a restart
        with pytest.raises(GenerationError, match="min_weight_version is 3, but the weights have version 0"):
            client.add(requests(1))
        assert client.num_in_flight == 0
        first.driver.weight_version = 4
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


class Hooked(dict[str, torch.Tensor]):
    """Weights that call `hook` when the first tensor is packed, which starts the transfer."""

    def __init__(self, weights: dict[str, torch.Tensor], hook: Callable[[], object]) -> None:
        super().__init__(weights)
        self._hook: Callable[[], object] | None = hook

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._hook:
            hook, self._hook = self._hook, None
            hook()
        return super().__getitem__(name)


def test_update_keeps_requests_in_flight(start_server: StartServer) -> None:
    """Tokens sampled after the update match an engine with the new weights; the server keeps answering meanwhile."""
    server = start_server()
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    with HTTPGenerator(server.url, chunk_tokens=1, bucket_bytes=4096) as client:
        client.add(requests(4, LONG))

        def served_meanwhile() -> None:
            assert server.http.post("/v1/completions", json={"prompt": [3], "max_tokens": 2}).status_code == 200

        client.update_weights(3, Hooked(weights_of(new), served_meanwhile))
        assert client.weight_version == 3
        assert not client.update_pending
        client.add(requests(2, LONG, first=50))
        completions = drain(client)
        versions = [set(completion.generated.weight_versions.tolist()) for completion in completions.values()]
        assert versions[-2:] == [{3}, {3}]
        (fresh,) = requests(1, LONG, first=90)
        client.add([fresh])
        (after,) = drain(client).values()
        engine = tiny_engine(old)
        engine.update_weights(3, weights_of(new))
        engine.add([fresh])
        assert_same(after, drain(engine)[90], rounding=1e-5)
        assert server.metric("weight_updates_total") == 1
        assert server.metric("weight_version") == 3
        client.update_weights(4, weights_of(old))
        assert client.weight_version == 4


def test_update_in_flight_matches_the_engine(start_server: StartServer) -> None:
    """Tokens and log-probabilities match an engine that is updated after the same number of steps."""
    new = weights_of(tiny_model(seed=1))
    expected, engine = tiny_engine(tiny_model()), tiny_engine(tiny_model())
    limited = Limited(engine, num_steps=5)
    with HTTPGenerator(start_server(limited).url, chunk_tokens=1) as client:
        client.add(requests(1, LONG))
        expected.add(requests(1, LONG))
        wait_for_tokens(client, 0, 5)
        for _ in range(5):
            expected.step()
        client.update_weights(2, new)
        expected.update_weights(2, new)
        limited.num_steps = 1000
        (completion,) = drain(client).values()
    assert completion.generated.weight_versions.tolist() == [0] * 5 + [2] * 19
    assert_same(completion, drain(expected)[0])


Weights = dict[str, torch.Tensor]
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {name: weights[name] for name in weights if name != NAME}, f"lack '{NAME}'"),
        (lambda weights: {**weights, "model.extra": weights[NAME]}, "no tensor 'model.extra'"),
        (lambda weights: {**weights, NAME: weights[NAME][:-1]}, r"announced as \[31, 48\], not \[32, 48\]"),
        (lambda weights: {**weights, NAME: weights[NAME].double()}, "float64"),
        (lambda weights: {**weights, NAME: weights[NAME].bfloat16()}, "bfloat16"),
        (lambda weights: {**weights, NAME: weights[NAME] / 0}, f"version 1 of the weights is refused: {NAME} has NaN"),
    ],
)
def test_a_refused_update_keeps_the_old_weights(
    start_server: StartServer, change: Callable[[Weights], Weights], message: str
) -> None:
    server = start_server(tiny_engine(tiny_model(), max_update_pause_s=1e-9))
    new = weights_of(tiny_model(seed=1))
    with HTTPGenerator(server.url) as client:
        client.add(requests(1))
        with pytest.raises(WeightUpdateError, match=message):
            client.update_weights(1, change(new))
        (completion,) = drain(client).values()
        assert set(completion.generated.weight_versions.tolist()) == {0}
        assert client.weight_version == 0
        client.update_weights(2, new)
        assert client.weight_version == 2


def test_a_second_concurrent_update_is_refused(start_server: StartServer) -> None:
    server = start_server()
    weights = weights_of(tiny_model(seed=1))
    body = {"version": 9, "names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}
    answers: list[httpx.Response] = []
    with HTTPGenerator(server.url) as first, HTTPGenerator(server.url) as second:

        def meanwhile() -> None:
            answers.append(server.http.post("/request_weight_update", json=body))
            with pytest.raises(WeightUpdateError, match="another weight update is going on"):
                second.update_weights(2, weights)

        first.update_weights(1, Hooked(weights, meanwhile))
        assert answers[0].status_code == 409
        assert answers[0].json()["error"]["code"] == "update_in_progress"
        assert first.weight_version == 1
        second.update_weights(2, weights)  # creates a new process group with the server
        assert first.weight_version == 2


class BrokenOffError(Exception):
    pass


def fail() -> None:
    raise BrokenOffError


def test_an_interrupted_update_keeps_the_old_weights(start_server: StartServer) -> None:
    server = start_server()
    weights = weights_of(tiny_model(seed=1))
    with HTTPGenerator(server.url, bucket_bytes=4096) as client:
        with pytest.raises(BrokenOffError):
            client.update_weights(1, Hooked(weights, fail))
        while (response := server.http.post("/request_weight_update", json=announcement())).status_code == 409:
            pass  # the server has not noticed the interruption yet
        assert response.status_code == 400
        assert "no process group" in response.json()["error"]["message"]
        assert client.weight_version == 0
        client.add(requests(1))
        drain(client)
        client.update_weights(2, weights)
        assert client.weight_version == 2


def announcement() -> dict[str, object]:
    weights = weights_of(tiny_model())
    return {
        "version": 1,
        "names": list(weights),
        "dtypes": ["float32"] * len(weights),
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def test_a_late_sender_times_out(start_server: StartServer) -> None:
    """The sender starts after the server has stopped waiting."""
    server = start_server()
    answered: list[httpx.Response] = []
    with HTTPGenerator(server.url, timeout_s=1) as client:
        client.update_weights(1, weights_of(tiny_model(seed=0)))
        # No sender follows this announcement.
        answered.append(server.http.post("/request_weight_update", json={**announcement(), "version": 2}))
        assert answered[0].status_code == 400
        error = answered[0].json()["error"]
        assert error["type"] == "weight_update_error"
        assert "version 2 did not arrive: bucket 1 of 1: " in error["message"]
        assert client.weight_version == 1
        with pytest.raises(WeightUpdateError):
            client.update_weights(3, weights_of(tiny_model(seed=1)))
        client.update_weights(4, weights_of(tiny_model(seed=1)))
        assert client.weight_version == 4


def test_admin_routes_need_the_token(start_server: StartServer) -> None:
    server = start_server(admin_token="sesame")
    routes: dict[str, dict[str, object] | None] = {
        "/abort": {"rollout_ids": []},
        "/pause": None,
        "/resume": None,
        "/init_process_group": {"master_address": "127.0.0.1", "master_port": 1, "rank": 1, "world_size": 2},
        "/request_weight_update": announcement(),
    }
    for route, body in routes.items():
        refused = server.http.post(route, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        wrong = server.http.post(route, json=body, headers={"Authorization": "Bearer open"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (403, "permission_error")
    assert not server.driver.paused
    weights = weights_of(tiny_model(seed=1))
    with HTTPGenerator(server.url) as stranger, pytest.raises(RequestError, match="Authorization: Bearer"):
        stranger.update_weights(1, weights)
    with HTTPGenerator(server.url, admin_token="sesame") as client:
        client.update_weights(1, weights)
        client.add(requests(1))
        client.abort([RolloutId(0)])
        assert client.weight_version == 1


def test_joining_an_absent_process_group_is_refused(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        body = {"master_address": "127.0.0.1", "master_port": 1, "rank": 1, "world_size": 2, "timeout_s": 1}
        response = http.post("/init_process_group", json=body)
        assert response.status_code == 400
        assert "rank 1 cannot join 127.0.0.1:1: " in response.json()["error"]["message"]
        response = http.post("/init_process_group", json={**body, "rank": 2})
        assert response.json()["error"]["message"] == "rank is 2, not 1 to 1"
        response = http.post("/init_process_group", json={**body, "master_address": "nowhere.invalid"})
        assert response.status_code == 400


def test_a_url_without_server_is_an_error() -> None:
    with pytest.raises(GenerationLostError, match=r"127\.0\.0\.1:9/health"):
        HTTPGenerator("http://127.0.0.1:9")
