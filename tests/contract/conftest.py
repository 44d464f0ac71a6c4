"""A tiny model behind real HTTP: uvicorn in a thread, on a free port of the loopback device."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from transformers import PreTrainedTokenizerFast

from midflight.config import SHIPPED_RECIPES
from midflight.generation.driver import GeneratorDriver
from midflight.generation.request_parsing import ServedModel
from midflight.generation.server import create_app
from midflight.models.loading import load_tokenizer, weights_of
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model
from midflight.weights.specs import specs_of

TOKENIZER = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"
MAX_TOKENS = 24


@dataclass(frozen=True)
class Server:
    url: str
    driver: GeneratorDriver
    app: Any
    http: httpx.Client

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"midflight_{name} "))


StartServer = Callable[..., Server]
RunApp = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(TOKENIZER)


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Tokenizer with a chat template that refuses system messages."""
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('only users may speak') }}"
        "{% endif %}{{ message['content'] }}{% endfor %}:"
    )
    return with_template


@contextmanager
def server_starter(tokenizer: PreTrainedTokenizerFast) -> Iterator[StartServer]:
    """Yield a function that starts a server; `options` go to `create_app`."""
    with ExitStack() as stack:

        def start(
            generator: Any = None,
            *,
            served_tokenizer: Any = None,
            stop_token_ids: tuple[int, ...] = (2,),
            **options: Any,
        ) -> Server:
            model = tiny_model()
            text = served_tokenizer or tokenizer
            served = ServedModel("tiny", text, stop_token_ids, VOCAB_SIZE, 32 + MAX_TOKENS, MAX_TOKENS, 16)
            driver = GeneratorDriver(generator or tiny_engine(model, max_new_tokens=MAX_TOKENS))
            app = create_app(driver, served, specs_of(weights_of(model)), **options)
            url = stack.enter_context(running(app))
            http = stack.enter_context(httpx.Client(base_url=url, timeout=60))
            return Server(url, driver, app, http)

        yield start


@pytest.fixture
def start_server(tokenizer: PreTrainedTokenizerFast) -> Iterator[StartServer]:
    with server_starter(tokenizer) as start:
        yield start


@pytest.fixture(name="running")
def running_fixture() -> RunApp:
    """Return `running`, for tests that start and stop their own server."""
    return running


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """Serve an application until the end of the block, and yield its URL."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def server(tokenizer: PreTrainedTokenizerFast) -> Iterator[Server]:
    """Server shared by the tests of a file, which must not change its state."""
    with server_starter(tokenizer) as start:
        yield start()


@pytest.fixture(scope="module")
def chat_server(chat_tokenizer: PreTrainedTokenizerFast) -> Iterator[Server]:
    with server_starter(chat_tokenizer) as start:
        yield start()
