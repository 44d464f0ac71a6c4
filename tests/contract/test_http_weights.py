"""Weight routes of a server: tensors arrive while it decodes, are checked, and wait until they are adopted."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from contract.generating import LONG, drain, requests
from contract.weight_sending import Sender, Weights, incoming
from midflight.errors import GenerationLostError, WeightUpdateError
from midflight.generation.access import Access
from midflight.generation.client import HTTPGenerator
from midflight.generation.http_errors import ApiError
from midflight.generation.weight_hosts import WeightHosts
from midflight.models.loading import weights_of
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import RolloutId, WeightLabel
from midflight.weights.engine_control import EngineError

if TYPE_CHECKING:
    from contract.conftest import Server, StartServer

NEW = weights_of(tiny_model(seed=1))
TOKEN = "0123456789abcdef" * 4
INVITATION = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank": 1,
    "world_size": 2,
    "token": TOKEN,
    "timeout_s": 1,
}
NAME = "model.layers.1.mlp.down_proj.weight"


class Hooked(dict[str, torch.Tensor]):
    """Weights that call `hook` when the first tensor is packed, in the middle of the transfer."""

    def __init__(self, weights: Weights, hook: Callable[[], object]) -> None:
        super().__init__(weights)
        self._hook: Callable[[], object] | None = hook

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._hook:
            hook, self._hook = self._hook, None
            hook()
        return super().__getitem__(name)


def announcement(version: int, **changes: Any) -> dict[str, Any]:
    return {
        "version": version,
        "names": list(NEW),
        "dtypes": ["float32"] * len(NEW),
        "shapes": [list(tensor.shape) for tensor in NEW.values()],
        **changes,
    }


def error_of(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


def test_paper_contract_answers_when_the_weights_are_in_use(start_server: StartServer) -> None:
    """The server answers other requests during the transfer; sequences in flight continue with the new weights."""
    server = start_server()
    with HTTPGenerator(server.url, chunk_tokens=1) as client, Sender(server.url, adopt=True) as sender:
        client.add(requests(4, LONG))

        def served_meanwhile() -> None:
            assert server.http.post("/v1/completions", json={"prompt": [3], "max_tokens": 2}).status_code == 200

        sender.send(3, Hooked(NEW, served_meanwhile))
        assert server.driver.active == WeightLabel(3, 3)
        client.add(requests(1, LONG, first=50))
        completions = drain(client)
        assert set(completions[50].generated.weight_versions.tolist()) == {3}
        assert client.weight_version == 3, "the client learns the version from tokens"
        assert server.metric("weight_updates_total") == 1
        assert server.metric("weight_version") == 3
        sender.send(4, NEW)
        assert server.driver.active == WeightLabel(4, 4)


def test_staged_weights_wait_for_adoption(start_server: StartServer) -> None:
    server = start_server()
    with Sender(server.url) as sender:
        sender.send(5, NEW, "run")
        health = server.http.get("/health").json()
        assert (health["weight_version"], health["lineage"]) == (0, "")
        assert (health["staged_version"], health["staged_lineage"], health["staged_content"]) == (5, "run", 5)
        progress = server.http.get("/weights").json()
        assert progress["received"] == progress["taken"] == progress["num_bytes"] > 0
        assert (progress["version"], progress["rank"], progress["world_size"]) == (5, 1, 2)
        adopted = server.http.post("/adopt", json={"version": 4, "lineage": "run"})
        assert adopted.json() == {"version": 5, "lineage": "run"}
        health = server.http.get("/health").json()
        assert (health["weight_version"], health["lineage"], health["content"]) == (5, "run", 5)
        assert health["staged_version"] is None


def test_new_version_of_known_weights_needs_no_transfer(start_server: StartServer) -> None:
    server = start_server()
    relabel: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "lineage": "run", "adopt": False}
    with Sender(server.url) as sender:
        sender.send(5, NEW, "run")
    for version in (6, 7):
        response = server.http.post("/request_weight_update", json={"version": version, "content": 5, **relabel})
        assert response.json()["bytes"] == 0
    assert server.http.post("/adopt", json={"version": 7, "lineage": "run"}).json()["version"] == 7
    assert server.driver.active == WeightLabel(7, 5, "run")
    engine = tiny_engine(tiny_model(seed=1))
    with HTTPGenerator(server.url) as client:
        for generator in (client, engine):
            generator.add(requests(1, LONG))
        assert drain(client)[0].generated.token_ids.tolist() == drain(engine)[0].generated.token_ids.tolist()
    for lineage, content in (("run", 6), ("other", 5)):
        body = {"version": 9, **relabel, "content": content, "lineage": lineage}
        status, code, _ = error_of(server.http.post("/request_weight_update", json=body))
        assert (status, code) == (409, "content_unknown")


def test_versions_never_go_back_within_a_lineage(start_server: StartServer) -> None:
    server = start_server()
    server.driver.stage(incoming(9, NEW, "first"))
    server.driver.adopt("first", 9).result()
    status, _, message = error_of(server.http.post("/request_weight_update", json=announcement(8, lineage="first")))
    assert status == 400
    assert message.startswith("version 8 is not newer than version 9, which serves")
    with Sender(server.url) as sender:
        sender.send(2, NEW, "second")
    assert server.http.post("/adopt", json={"version": 1, "lineage": "second"}).json()["version"] == 2
    assert server.driver.active == WeightLabel(2, 2, "second")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {name: weights[name] for name in weights if name != NAME}, f"lack '{NAME}'"),
        (lambda weights: {**weights, "model.extra": weights[NAME]}, "no tensor 'model.extra'"),
        (
            lambda weights: {**weights, NAME: weights[NAME][:-1]},
            rf"'{NAME}' is announced as float32 \[31, 48\], not float32 \[32, 48\]",
        ),
        (lambda weights: {**weights, NAME: weights[NAME].bfloat16()}, r"bfloat16 \[32, 48\], not float32 \[32, 48\]"),
    ],
)
def test_weights_of_another_model_are_refused_before_the_transfer(
    server: Server, change: Callable[[Weights], Weights], message: str
) -> None:
    with Sender(server.url) as sender:
        with pytest.raises(EngineError, match=message) as refusal:
            sender.send(1, change(NEW))
        assert refusal.value.kind == "unfit"
    assert server.driver.active.version == 0


def test_nonfinite_weights_are_refused_and_name_the_tensor(start_server: StartServer) -> None:
    server = start_server()
    with HTTPGenerator(server.url) as client, Sender(server.url, adopt=True) as sender:
        client.add(requests(1))
        with pytest.raises(WeightUpdateError, match=f"version 1 of the weights is refused: {NAME} has NaN"):
            sender.send(1, {**NEW, NAME: NEW[NAME] / 0})
        (completion,) = drain(client).values()
        assert set(completion.generated.weight_versions.tolist()) == {0}
        sender.send(2, NEW)
        assert server.driver.active.version == 2


def test_concurrent_update_is_refused(start_server: StartServer) -> None:
    server = start_server()
    answers: list[httpx.Response] = []
    with Sender(server.url, adopt=True) as first:

        def meanwhile() -> None:
            while server.http.get("/weights").json()["version"] != 1:
                pass  # the announcement is on its way
            answers.append(server.http.post("/request_weight_update", json=announcement(9)))

        first.send(1, Hooked(NEW, meanwhile))
        assert error_of(answers[0])[:2] == (409, "update_in_progress")
        assert server.driver.active.version == 1


def test_a_newer_invitation_ends_a_receive(start_server: StartServer) -> None:
    server = start_server()
    with Sender(server.url, adopt=True) as first, Sender(server.url, adopt=True) as second:

        def meanwhile() -> None:
            while server.http.get("/weights").json()["version"] != 1:
                pass  # the announcement is on its way
            second.send(2, NEW)

        with pytest.raises(WeightUpdateError):
            first.send(1, Hooked(NEW, meanwhile))
        assert server.driver.active.version == 2


class BrokenOffError(Exception):
    pass


def fail() -> None:
    raise BrokenOffError


def test_interrupted_update_keeps_the_old_weights(start_server: StartServer) -> None:
    server = start_server()
    with HTTPGenerator(server.url) as client, Sender(server.url, adopt=True) as sender:
        with pytest.raises(BrokenOffError):
            sender.send(1, Hooked(NEW, fail))
        while (response := server.http.post("/request_weight_update", json=announcement(1))).status_code == 409:
            pass  # the server has not noticed the interruption yet
        assert response.status_code == 400
        assert "no process group" in response.json()["error"]["message"]
        assert server.driver.active.version == 0
        client.add(requests(1))
        drain(client)
        sender.send(2, NEW)
        assert server.driver.active.version == 2


def test_admin_routes_need_the_token(start_server: StartServer) -> None:
    server = start_server(access=Access("sesame"))
    routes: dict[str, dict[str, Any] | None] = {
        "/abort": {"rollout_ids": []},
        "/pause": None,
        "/resume": None,
        "/init_process_group": INVITATION,
        "/request_weight_update": announcement(1),
        "/adopt": {"version": 1},
    }
    for route, body in routes.items():
        refused = server.http.post(route, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        wrong = server.http.post(route, json=body, headers={"Authorization": "Bearer open"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (403, "permission_error")
    assert not server.driver.paused
    with Sender(server.url) as stranger, pytest.raises(EngineError, match="Authorization: Bearer"):
        stranger.send(1, NEW)
    with pytest.raises(GenerationLostError, match="the admin token is wrong"):
        HTTPGenerator(server.url)
    with HTTPGenerator(server.url, admin_token="sesame") as client, Sender(server.url, token="sesame") as sender:
        sender.send(1, NEW)
        client.adopt(1)
        while client.weight_version < 1:
            client.step()
        client.add(requests(1))
        client.abort([RolloutId(0)])


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_id": 3},
        {"generated": {"token_ids": [5], "logprobs": [-1.0], "weight_versions": [0]}},
        {"weight_lineage": ""},
        {"min_weight_version": 0},
    ],
)
def test_strangers_cannot_use_the_fields_of_a_run(start_server: StartServer, fields: dict[str, Any]) -> None:
    server = start_server(access=Access("sesame"))
    body = {"prompt": [5, 6], "max_tokens": 3}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    refused = server.http.post("/v1/completions", json=body | fields)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    allowed = server.http.post("/v1/completions", json=body | fields, headers={"Authorization": "Bearer sesame"})
    assert allowed.status_code == 200


def test_absent_process_group_is_refused(server: Server) -> None:
    refusals: dict[str, dict[str, object]] = {
        "rank 1 cannot join 127.0.0.1:1: ": {},
        "rank is 2, not 1 to 1": {"rank": 2},
        "no address of 'nowhere.invalid'": {"master_address": "nowhere.invalid"},
        "the sender follows version 9 of the protocol, and this server version 2": {"protocol": 9},
    }
    for message, change in refusals.items():
        status, _, text = error_of(server.http.post("/init_process_group", json={**INVITATION, **change}))
        assert status == 400
        assert text.startswith(message)


@pytest.mark.parametrize(
    "change",
    [
        {"master_address": "a" * 64 + ".invalid"},  # longer than a label of a host name may be
        {"master_address": "a" * 255},
        {"master_address": "a..b"},
        {"master_address": "127.0.0.1\0.invalid"},
        {"master_address": "127.0.0.1 "},
        {"master_address": " "},
        {"master_address": ""},
        {"master_address": "\u00e9" * 64},
        {"master_address": "\ud800"},
        {"master_address": "::1%nowhere"},
        {"master_address": "::1%" + "a" * 80},
        {"master_address": "[::1]"},
        {"master_address": "http://127.0.0.1"},
        {"master_address": "256.1.1.1"},
        {"master_address": "::1"},
        {"master_address": None},
        {"master_port": 0},
        {"master_port": 65536},
        {"master_port": "http"},
        {"token": "short"},
        {"token": None},
        {"backend": "gloo"},
        {"timeout_s": 0},
    ],
)
def test_invitations_that_lead_nowhere_are_refused(server: Server, change: dict[str, object]) -> None:
    body = json.dumps({**INVITATION, **change})  # escapes what UTF-8 cannot encode
    response = server.http.post("/init_process_group", content=body, headers={"Content-Type": "application/json"})
    status, _, message = error_of(response)
    assert status == 400
    assert message
    assert TOKEN not in message
    assert server.http.post("/v1/completions", json={"prompt": [3], "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "2001:db8::1", "fe80::1%lo", "::ffff:192.0.2.1"])
def test_invitations_to_other_hosts_need_a_setting(start_server: StartServer, host: str) -> None:
    """The client is on this machine. The addresses belong to nobody, and nothing is sent to them."""
    body = {**INVITATION, "master_address": host}
    status, _, message = error_of(start_server().http.post("/init_process_group", json=body))
    assert status == 403
    assert message.endswith("add this address to serve.weight_hosts")
    elsewhere = WeightHosts([ipaddress.ip_network("10.0.0.0/8")])
    refused = start_server(weight_hosts=elsewhere).http.post("/init_process_group", json=INVITATION)
    assert error_of(refused)[0] == 403
    assert "this server does not take weights from 127.0.0.1" in error_of(refused)[2]


def test_setting_allows_hosts_beside_the_client() -> None:
    hosts = WeightHosts([ipaddress.ip_network("192.0.2.0/24"), ipaddress.ip_network("2001:db8::1")])
    for host, client in (("192.0.2.7", "127.0.0.1"), ("2001:db8::1", None), ("::ffff:192.0.2.7", "198.51.100.1")):
        assert hosts.address_of(host, 1, client) == host
    own = WeightHosts()
    for host, client in (("192.0.2.7", "192.0.2.7"), ("192.0.2.7", "::ffff:192.0.2.7"), ("127.0.0.2", "::1")):
        assert own.address_of(host, 1, client) == host
    for host, client in (("192.0.2.7", "192.0.2.8"), ("127.0.0.1", "192.0.2.7"), ("192.0.2.7", "nonsense")):
        with pytest.raises(ApiError):
            own.address_of(host, 1, client)
