"""The rollout stream: one WebSocket for many requests and their tokens."""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from contract.conftest import RunApp, Server, StartServer
from contract.generating import LONG, drain, requests
from midflight.errors import GenerationLostError, RequestError
from midflight.generation import rollout_stream
from midflight.generation.access import Access
from midflight.generation.client import HTTPGenerator
from midflight.generation.stream_messages import (
    PATH,
    Add,
    Chunk,
    Chunks,
    Reply,
    Request,
    Tokens,
    decode_from_client,
    decode_from_server,
    encode,
)
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, GeneratedTokens, RolloutId


def connected(server: Server, **headers: str) -> ClientConnection:
    url = f"ws{server.url.removeprefix('http')}{PATH}"
    return connect(url, additional_headers=headers, compression=None, proxy=None)


def wait_until_idle(server: Server) -> None:
    while server.http.get("/health").json()["in_flight"]:
        pass


def test_tokens_of_many_requests_share_frames(start_server: StartServer) -> None:
    server = start_server()
    server.http.post("/pause")
    with connected(server) as connection:
        connection.send(encode(Add(7, [Request.of(request) for request in requests(8)], 1, None, 0)))
        assert decode_from_server(connection.recv(decode=False)) == Reply(7)
        server.http.post("/resume")
        frames: list[list[Chunk]] = []
        while sum(bool(chunk.finish_reason) for frame in frames for chunk in frame) < 8:
            message = decode_from_server(connection.recv(decode=False))
            assert isinstance(message, Chunks)
            frames.append(message.chunks)
    assert {chunk.rollout_id for frame in frames for chunk in frame} == set(range(8))
    assert max(map(len, frames)) > 1, "tokens of one step share a frame"


def test_the_end_of_the_connection_aborts_its_requests(start_server: StartServer) -> None:
    server = start_server()
    server.http.post("/pause")
    with connected(server) as connection:
        connection.send(encode(Add(1, [Request.of(request) for request in requests(3)], 1, None, 0)))
        connection.recv()
        assert server.http.get("/health").json()["in_flight"] == 3
    wait_until_idle(server)


@pytest.mark.parametrize("frame", [b"\xc1", encode({"type": "add"}), encode(["what"]), "text"])
def test_a_frame_that_is_no_message_ends_the_connection_only(start_server: StartServer, frame: bytes | str) -> None:
    server = start_server()
    with connected(server) as connection:
        connection.send(frame)
        with pytest.raises(ConnectionClosed):
            connection.recv(30)
    with HTTPGenerator(server.url) as client:
        client.add(requests(1))
        assert len(drain(client)) == 1


def test_a_message_of_an_older_client_is_refused_in_one_line(start_server: StartServer) -> None:
    """Also while a run is connected, which goes on."""
    server = start_server()
    with HTTPGenerator(server.url) as client, connected(server) as connection:
        client.add(requests(2))
        connection.send(encode({"type": "add", "number": 1, "requests": [[7, b"", "greedy"]], "chunk_tokens": 1}))
        with pytest.raises(ConnectionClosed, match="Expected `array` of at least length") as refusal:
            connection.recv(30)
        assert "\n" not in str(refusal.value)
        assert len(drain(client)) == 2


def test_arrays_of_different_lengths_are_refused(start_server: StartServer) -> None:
    server = start_server()
    tokens = GeneratedTokens(np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
    (request,) = requests(1)
    message = msgspec.msgpack.decode(encode(Add(1, [Request.of(replace(request, generated=tokens))], 1, None, 0)))
    *_, arrays = message["requests"][0]
    arrays[1] = arrays[1][:4]
    with connected(server) as connection:
        connection.send(encode(message))
        with pytest.raises(ConnectionClosed, match="not arrays of the same length"):
            connection.recv(30)


def test_browsers_are_refused(server: Server) -> None:
    """A page of another site could connect otherwise: WebSockets know no same-origin policy."""
    with pytest.raises(InvalidStatus) as refusal, connected(server, Origin="https://example.com"):
        pass
    assert refusal.value.response.status_code == 403


def test_a_wrong_token_is_refused(start_server: StartServer) -> None:
    server = start_server(access=Access("sesame"))
    for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "sesame"}):
        with pytest.raises(InvalidStatus), connected(server, **headers):
            pass
    with connected(server, Authorization="Bearer sesame"):
        pass


def test_a_large_call_travels_in_several_messages(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_stream, "_MAX_TOKENS_PER_MESSAGE", 200)
    server = start_server()
    with HTTPGenerator(server.url) as client:
        client.add(requests(20))
        assert len(drain(client)) == 20
        server.http.post("/pause")
        bad = replace(requests(1, first=90)[0], prompt_token_ids=np.zeros(0, np.int32))
        with pytest.raises(RequestError, match="0 tokens"):
            client.add([*requests(20), bad])
        assert client.num_in_flight == 0
        wait_until_idle(server)
        server.http.post("/resume")
        client.add(requests(20))
        assert len(drain(client)) == 20


class Blocked:
    """Engine that samples nothing, and with a method that returns when the test releases it."""

    def __init__(self, method: str) -> None:
        self._engine, self._method = tiny_engine(tiny_model()), method
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            assert self.released.wait(60)
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        return []


@pytest.mark.parametrize("method", ["add", "abort"])
def test_a_slow_server_is_waited_for_while_it_gives_signs_of_life(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(rollout_stream, "CHECK_S", 0.02)
    engine, num_pings, ping = Blocked(method), 0, AsyncConnection.ping

    async def counted(self: AsyncConnection) -> Awaitable[float]:
        nonlocal num_pings
        num_pings += 1
        if num_pings == 3:
            engine.released.set()
        return await ping(self)

    monkeypatch.setattr(AsyncConnection, "ping", counted)
    with HTTPGenerator(start_server(engine).url) as client:
        client.add(requests(2, LONG))
        assert [completion.finish_reason for completion in client.abort([RolloutId(0)])] == [FinishReason.ABORT]
        assert num_pings >= 3


@pytest.mark.parametrize("method", ["add", "abort"])
def test_a_server_without_a_sign_of_life_is_lost(
    server: Server, running: RunApp, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Everything that had arrived is kept; the client does not wait for the timeout of an answer."""
    monkeypatch.setattr(rollout_stream, "CHECK_S", 0.02)
    released, health = threading.Event(), server.http.get("/health").content

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": health})
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            message = decode_from_client((await receive())["bytes"])
            if method == "abort":
                one_token = Tokens.of(GeneratedTokens(*(np.ones(1, dtype) for dtype in ("<i4", "<f4", "<i4"))))
                for answer in (Reply(message.number), Chunks([Chunk(0, one_token, "")])):
                    await send({"type": "websocket.send", "bytes": encode(answer)})
                await receive()
            released.wait(60)  # the event loop hangs

    notified = threading.Event()
    with running(app) as url:
        try:
            with HTTPGenerator(url, notify=notified.set) as client:
                client.add(requests(1))
                if method == "abort":
                    while not len(client.generated(RolloutId(0))):
                        pass
                    (aborted,) = client.abort([RolloutId(0)])
                    assert len(aborted.generated) == 1
                else:
                    assert notified.wait(60)
                    with pytest.raises(GenerationLostError, match="it gives no answer"):
                        client.step()
        finally:
            released.set()
