"""`midflight serve`: one engine behind the HTTP contract, in one process.

waits for      requests; Ctrl-C or SIGTERM
unblocked by   either; a signal aborts the requests in flight, so that every client gets its tokens
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable

import torch
import uvicorn

from midflight.config import Recipe
from midflight.errors import RecipeError
from midflight.generation.client import TOKEN_VARIABLE
from midflight.generation.driver import GeneratorDriver
from midflight.generation.request_parsing import ServedModel
from midflight.generation.server import create_app
from midflight.launch.build import check_model, num_threads
from midflight.launch.engines import build_engine
from midflight.models.loading import load_config, load_model, stop_token_ids, weights_of
from midflight.weights.specs import specs_of

_KEEPALIVE_S = 30
_SHUTDOWN_S = 5


def serve_model(recipe: Recipe, announce: Callable[[str], object], retire: Callable[[], object]) -> None:
    """Serve until a signal comes. `announce` gets the URL once requests are accepted; `retire` is called at the end.

    Raises: RecipeError if the [serve] settings do not work; ModelError; KeyboardInterrupt after Ctrl-C.
    """
    config, path = recipe.serve, recipe.model.path
    admin_token = _admin_token(recipe)
    tokenizer = check_model(recipe)
    listener = _listen(config.host, config.port)
    with listener:
        torch.set_num_threads(num_threads(recipe.engine.threads, colocated=True))
        model_config, weights = load_config(path), weights_of(load_model(path))
        engine = build_engine(recipe, model_config, weights, max_num_seqs=config.num_in_flight)
        model = ServedModel(
            name=config.model_name or path.name,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(path, tokenizer),
            vocab_size=model_config.vocab_size,
            max_length=recipe.max_length,
            max_tokens=recipe.sampling.max_tokens,
            max_samples=config.max_samples,
        )
        driver = GeneratorDriver(engine)
        app = create_app(
            driver,
            model,
            specs_of(weights),
            admin_token=admin_token,
            max_body_bytes=config.max_body_bytes,
            device=recipe.engine.device,
        )
        settings = uvicorn.Config(
            app, log_level="warning", timeout_keep_alive=_KEEPALIVE_S, timeout_graceful_shutdown=_SHUTDOWN_S
        )
        _Server(settings, driver, lambda: announce(_url(listener)), retire).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        driver: GeneratorDriver,
        on_ready: Callable[[], object],
        on_end: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._driver, self._on_ready, self._on_end = driver, on_ready, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end()
        self._driver.abort()
        await super().shutdown(sockets)


def _admin_token(recipe: Recipe) -> str | None:
    """Return the admin token, if any. Raises: RecipeError if without one the whole network could change the weights."""
    secret, host = recipe.serve.admin_token, recipe.serve.host
    token = secret.get_secret_value() if secret else os.environ.get(TOKEN_VARIABLE)
    if not token and not _is_loopback(host):
        raise RecipeError(
            f"serve.host = {host!r} is not loopback, so an admin token is needed: set serve.admin_token or"
            f" {TOKEN_VARIABLE}; host 127.0.0.1 would work without"
        )
    return token or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    """Open the server socket. Called before the model is loaded, so that a port in use is reported at once.

    Raises: RecipeError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise RecipeError(f"cannot listen on {host}:{port}: {reason}; serve.port = 0 picks a free port") from error
    # Connections inherit TCP_NODELAY. asyncio sets it only on sockets created with an explicit protocol. Without it, an
    # answer on a kept connection waits 40 ms for the client's delayed acknowledgment.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
