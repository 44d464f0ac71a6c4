"""`midflight serve`: one engine behind the HTTP contract, in one process.

waits for      requests; Ctrl-C or SIGTERM
unblocked by   either; a signal aborts the requests in flight, so that every client gets its tokens
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import ssl
from collections.abc import Callable

import torch
import uvicorn

from midflight.config import Recipe
from midflight.config.section import OwnSection
from midflight.engine.cache import PAGE_SIZE, page_bytes
from midflight.engine.hf_module import module_shape
from midflight.errors import RecipeError
from midflight.generation.admission import QueueLimit
from midflight.generation.driver import GeneratorDriver
from midflight.generation.hosts import HostRules
from midflight.generation.request_parsing import ServedModel
from midflight.generation.server import create_app
from midflight.generation.weight_hosts import WeightHosts
from midflight.launch.build import check_model, num_threads
from midflight.launch.engines import build_engine
from midflight.models.loading import load_config, load_model, load_tokenizer, stop_token_ids, weights_of
from midflight.models.prompts import PromptFormat
from midflight.models.stopping import StopRules
from midflight.protocols import WeightReceiver
from midflight.run.connections import KEEPALIVE_S, RESERVE, Connections, GuardedConfig, HttpProtocol
from midflight.run.listening import Acceptor, listen, tls_context, url_of
from midflight.run.log_limits import limit_logs
from midflight.run.secrets import access_of
from midflight.weights.specs import specs_of

_SHUTDOWN_S = 5
_TICKS_PER_SWEEP = 10  # of uvicorn, which ticks ten times a second
_OTHER_FILES = 512  # of the process, besides connections: weights, links to other servers, threads
_CACHE_SHARE = 4  # the default KV cache has at most a quarter of the memory


def serve_model(
    recipe: Recipe,
    announce: Callable[[str], object],
    retire: Callable[[], object],
    *,
    limits_of_model: bool = True,
    receiver: WeightReceiver | None = None,
) -> None:
    """Serve until a signal comes. `announce` gets the URL once requests are accepted; `retire` is called at the end.

    `limits_of_model`: lengths that the recipe does not set are limited by the model's context only. `receiver`: weights
    that this server takes itself.
    Raises: RecipeError if the [serve] settings do not work; ModelError; KeyboardInterrupt after Ctrl-C.
    """
    config, path = recipe.serve, recipe.model.path
    access, tls = access_of(recipe), tls_context(config)
    tokenizer = check_model(recipe)
    recipe, max_total_tokens = with_model_limits(recipe) if limits_of_model else (recipe, None)
    listener = listen(config.host, config.port)
    with listener:
        limit_logs()
        _raise_file_limit(config.max_connections)
        torch.set_num_threads(num_threads(recipe.engine.threads, colocated=True))
        model_config, weights = load_config(path), weights_of(load_model(path))
        engine = build_engine(
            recipe,
            model_config,
            weights,
            max_num_seqs=config.num_in_flight,
            max_total_tokens=max_total_tokens,
            stop_rules=StopRules(load_tokenizer(path)),  # not the server's tokenizer: the engine has its own thread
        )
        model = ServedModel(
            name=config.model_name or path.name,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(path, PromptFormat(tokenizer)),
            vocab_size=model_config.vocab_size,
            max_length=max_total_tokens or recipe.max_engine_length,
            max_tokens=recipe.sampling.max_tokens,
            max_samples=config.max_samples,
        )
        driver = GeneratorDriver(engine, config.num_in_flight)
        connections = Connections(config.max_connections, config.max_connections_per_client, config.client_timeout_s)
        app = create_app(
            driver,
            model,
            specs_of(weights),
            access=access,
            hosts=HostRules((config.host, socket.gethostname(), *config.allowed_hosts), config.allowed_origins),
            origins=config.allowed_origins,
            queue=QueueLimit(config.max_queue, config.max_queue_per_client),
            max_body_bytes=config.max_body_bytes,
            device=recipe.engine.device,
            receiver=receiver,
            weight_hosts=WeightHosts(config.weight_hosts),
            connections=connections,
        )
        settings = GuardedConfig(
            app,
            connections,
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # limits are for the real address of a client
            server_header=False,
            timeout_keep_alive=KEEPALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        _Server(settings, driver, listener, tls, lambda: announce(url_of(listener, tls is not None)), retire).run([])


class _Server(uvicorn.Server):
    """Uvicorn with an accept loop of its own."""

    config: GuardedConfig

    def __init__(
        self,
        config: GuardedConfig,
        driver: GeneratorDriver,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        on_ready: Callable[[], object],
        on_end: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._driver, self._on_ready, self._on_end = driver, on_ready, on_end
        timeout_s = config.connections.timeout_s
        self._acceptor = Acceptor(listener, self._protocol, tls, timeout_s, lambda: driver.num_runs > 0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # Objects that live as long as the server need no visits of the garbage collector. With them, parsing a
            # request of a million values takes five times as long.
            gc.freeze()
            self._accepting = asyncio.create_task(self._acceptor.run())
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            self.config.connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        gc.unfreeze()  # libraries report objects that are left at the end
        self._on_end()
        self._driver.wind_down()
        await super().shutdown(sockets)

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, self.lifespan.state)


def _raise_file_limit(num_connections: int) -> None:
    """Allow as many open files as the connections need, if the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + RESERVE + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def with_model_limits(recipe: Recipe) -> tuple[Recipe, int | None]:
    """Return the recipe with its unset lengths limited by the model's context, and the context (tokens).

    The context is shorter than the model's if the KV cache of one sequence would need more than a quarter of the
    memory. If the recipe sets both lengths or has its own engine, nothing changes and the context is None.
    Raises: RecipeError if a length leaves no room in the context.
    """
    engine, sampling = recipe.engine, recipe.sampling
    lengths = {"engine.max_prompt_tokens": engine.max_prompt_tokens, "sampling.max_tokens": sampling.max_tokens}
    unset = [key for key in lengths if not _is_set(recipe, key)]
    if not unset or isinstance(engine, OwnSection):
        return recipe, None
    shape = module_shape(load_config(recipe.model.path))
    cache_mib = engine.kv_cache_mib or _memory_bytes(engine.device) // _CACHE_SHARE >> 20
    dtype = torch.float32 if engine.dtype == "auto" else getattr(torch, engine.dtype)
    num_pages = (cache_mib << 20) // page_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    # One page is never allocated to a sequence. If no other page fits, the engine says so.
    context = min(shape.max_positions, max(1, num_pages - 1) * PAGE_SIZE)
    for key, length in lengths.items():
        if key not in unset and length >= context:
            raise RecipeError(
                f"{key} = {length} leaves no room for the rest of a sequence: the model and the KV cache hold {context}"
                f" tokens; {context - 1} or less would work"
            )
    prompt, response = (context - 1 if key in unset else length for key, length in lengths.items())
    engine = engine.model_copy(update={"max_prompt_tokens": prompt, "kv_cache_mib": cache_mib})
    sampling = sampling.model_copy(update={"max_tokens": response})
    return recipe.model_copy(update={"engine": engine, "sampling": sampling}), context


def _is_set(recipe: Recipe, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(recipe, section).model_fields_set


def _memory_bytes(device: str) -> int:
    """Size of the memory of the CPU, or free memory of a CUDA device (bytes)."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.mem_get_info(device)[0]
