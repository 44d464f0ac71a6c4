"""`midflight serve`: one engine behind the HTTP contract, in one process.

waits for      requests; Ctrl-C or SIGTERM
unblocked by   either; a signal aborts the requests in flight, so that every client gets its tokens
"""

from __future__ import annotations

import os
import socket
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
from midflight.run.secrets import access_of
from midflight.weights.specs import specs_of

_KEEPALIVE_S = 30
_SHUTDOWN_S = 5
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
    access = access_of(recipe)
    tokenizer = check_model(recipe)
    recipe, max_total_tokens = with_model_limits(recipe) if limits_of_model else (recipe, None)
    listener = _listen(config.host, config.port)
    with listener:
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
        self._driver.wind_down()
        await super().shutdown(sockets)


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
