"""Clients without a secret, with a key, and with the admin token; ids of a run; hosts and origins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from contract.generating import LONG, drain, requests
from midflight.generation.access import Access, KeyFile
from midflight.generation.admission import QueueLimit
from midflight.generation.client import HTTPGenerator
from midflight.generation.hosts import HostRules
from midflight.types import RolloutId

if TYPE_CHECKING:
    from contract.conftest import Server, StartServer

BODY = {"prompt": [5, 6], "max_tokens": 3}


def ask(url: str, key: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return client.completions.create(model="tiny", prompt=[5, 6], max_tokens=3)


def test_openai_routes_need_a_key(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("fresh\nstale 2026-01-01T00:00:00Z\n")
    server = start_server(access=Access("sesame", ["open"], KeyFile(keys)))
    for key in ("open", "fresh", "sesame"):
        assert ask(server.url, key).usage.completion_tokens
    for key, message in (("shut", "the API key is wrong"), ("stale", "the API key has expired")):
        with pytest.raises(openai.AuthenticationError, match=message) as refusal:
            ask(server.url, key)
        assert refusal.value.code == "invalid_api_key"
        assert refusal.value.response.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/weights"):
        assert server.http.get(path).status_code == 401
        assert server.http.get(path, headers={"Authorization": "Bearer open"}).status_code == 200
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/pause", headers={"Authorization": "Bearer open"}).status_code == 403


def test_strangers_cannot_take_the_ids_of_a_run(start_server: StartServer) -> None:
    """Also on a server without secrets: the same id on both routes is two sequences with the same tokens."""
    server = start_server()
    server.http.post("/pause")
    with HTTPGenerator(server.url) as client:
        client.add(requests(2, LONG))
        body = {"prompt": [2, 5, 6], "seed": 4, "rollout_id": 0, "stop_token_ids": [], "return_token_ids": True}
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}):
            assert server.http.get("/health").json()["in_flight"] == 3
            aborted = server.http.post("/abort", json={"rollout_ids": [0, 1]}).json()["aborted"]
            assert [each["rollout_id"] for each in aborted] == [0], "the stranger's, not the run's"
        with HTTPGenerator(server.url) as other:
            other.add(requests(2, LONG))
        server.http.post("/resume")
        completions = drain(client)
    token_ids = server.http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert completions[RolloutId(0)].generated.token_ids.tolist() == token_ids


def test_a_full_queue_is_a_429(start_server: StartServer) -> None:
    server = start_server(queue=QueueLimit(total=8, per_client=4), access=Access("sesame", ["open", "other", "third"]))
    admin = {"Authorization": "Bearer sesame"}
    server.http.post("/pause", headers=admin)

    def start(key: str, n: int) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        request = server.http.build_request(
            "POST", "/v1/completions", json=BODY | {"n": n, "stream": True}, headers=headers
        )
        return server.http.send(request, stream=True)

    waiting = [start("open", 4), start("other", 3)]
    for key, n in (("open", 1), ("third", 2)):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.RateLimitError, match="try again later") as refusal:
                client.completions.create(model="tiny", prompt=[5, 6], n=n)
            assert refusal.value.code == "rate_limit_exceeded"
            assert int(refusal.value.response.headers["Retry-After"]) > 0
    waiting.append(start("sesame", 9))  # a run is never refused
    server.http.post("/resume", headers=admin)
    for response in waiting:
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert server.http.get("/health").json()["in_flight"] == 0
    assert ask(server.url, "open").usage.completion_tokens, "the queue has room again"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example:80"}, 421),
        ({"Host": "192.0.2.7"}, 421),
        ({"Host": "["}, 421),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "named.example"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://good.example"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
    ],
)
def test_host_and_origin_are_checked(start_server: StartServer, headers: dict[str, str], status: int) -> None:
    server = start_server(hosts=HostRules(["named.example"], ["https://good.example"]))
    for path, body in (("/pause", None), ("/v1/completions", BODY)):
        response = server.http.post(path, json=body, headers=headers)
        if path == "/pause" and status == 200:
            server.http.post("/resume")
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["message"]


def test_redirects_are_never_built_from_the_host(server: Server) -> None:
    response = httpx.post(f"{server.url}/v1/completions/", json=BODY)
    assert response.status_code == 404
    assert "location" not in response.headers


def test_pages_of_allowed_origins_may_read_answers(start_server: StartServer) -> None:
    origins = ["https://good.example"]
    server = start_server(hosts=HostRules([], origins), origins=origins)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, status in (("https://good.example", 200), ("https://evil.example", 400)):
        preflight = server.http.options("/v1/completions", headers={"Origin": origin} | asked)
        assert preflight.status_code == status
    answer = server.http.post("/v1/completions", json=BODY, headers={"Origin": "https://good.example"})
    assert answer.headers["access-control-allow-origin"] == "https://good.example"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({f"u{number}": 0 for number in range(50_000)} | {"prompt": "a"}, "u0: Extra inputs are not permitted"),
        ({"prompt": [True] * 50_000}, "prompt.0: "),
        ({"prompt": "a" * 1000}, "prompt has 1000 characters, and 56 tokens have at most 896"),
        ({"prompt": "a", "metadata": {str(number): "" for number in range(2000)}}, "metadata"),
        ({"prompt": "a", "logit_bias": {str(number): "x" for number in range(2000)}}, "at most 1024 entries"),
        ({"prompt": "a", "model": "m" * 50_000}, "there is no model"),
        ({"prompt": "a", "m" * 50_000: 0}, "mmm..."),
    ],
)
def test_large_bodies_have_one_short_error(server: Server, body: dict[str, Any], message: str) -> None:
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code in (400, 404)
    assert message in response.json()["error"]["message"]
    assert len(response.content) < 1500


def test_long_conversations_are_refused_before_they_are_rendered(chat_server: Server) -> None:
    message = {"role": "user", "content": "a" * 100}
    for body, field in (
        ({"messages": [message] * 57}, "57 messages do not fit into 56 tokens"),
        ({"messages": [message] * 10}, "messages has 1000 characters"),
        ({"messages": [message], "chat_template_kwargs": {"a": "b" * 1000}}, "chat_template_kwargs has"),
    ):
        response = chat_server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert field in response.json()["error"]["message"]
