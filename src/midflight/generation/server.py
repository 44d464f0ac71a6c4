"""The HTTP server application: one Generator, one tokenizer, one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from midflight.generation.access import Access
from midflight.generation.admission import QueueLimit
from midflight.generation.control_routes import control_router, metrics_router
from midflight.generation.driver import GeneratorDriver
from midflight.generation.gate import ConnectionTable, Gate
from midflight.generation.hosts import HostRules
from midflight.generation.http_errors import BodyLimit, install_error_handlers
from midflight.generation.openai_routes import openai_router
from midflight.generation.request_parsing import ServedModel
from midflight.generation.served_requests import ServedRequests, too_many_requests
from midflight.generation.stream_route import stream_router
from midflight.generation.weight_hosts import WeightHosts
from midflight.generation.weight_intake import WeightIntake
from midflight.generation.weight_pull import WeightPull
from midflight.models.stopping import StopRules
from midflight.protocols import WeightReceiver
from midflight.types import TensorSpec

DEFAULT_MAX_BODY_BYTES = 4 << 20


def create_app(
    driver: GeneratorDriver,
    model: ServedModel,
    weight_specs: Sequence[TensorSpec],
    *,
    access: Access | None = None,
    hosts: HostRules | None = None,
    origins: Sequence[str] = (),
    queue: QueueLimit | None = None,
    connections: ConnectionTable | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    device: str = "cpu",
    receiver: WeightReceiver | None = None,
    weight_hosts: WeightHosts | None = None,
) -> FastAPI:
    """Create the application over a running driver; the application closes the driver at shutdown.

    `access`: secrets of the server; default: none. `hosts`: allowed values of the headers Host and Origin. `origins`:
    sites whose pages may read answers. `queue`: limit on the sequences of other clients than the run. `connections`:
    the open connections. `device`: device that receives new weights. `receiver`: weights that this server takes itself;
    None: a sender brings them. `weight_hosts`: that a sender may have; default: the host that its request comes from.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        weights.close()
        if pull is not None:
            pull.close()
        driver.close()

    weights = WeightIntake(driver, weight_specs, device, weight_hosts)
    pull = None if receiver is None else WeightPull(driver, receiver)

    served_requests = ServedRequests(driver, queue)
    app = FastAPI(
        title="Midflight",
        description="Generation with in-flight weight updates.",
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would be built from the client's header Host
    )
    app.include_router(openai_router(model, served_requests))
    app.include_router(control_router(driver, served_requests, weights, pull))
    app.include_router(metrics_router(driver))
    app.include_router(stream_router(driver, StopRules(model.tokenizer)))
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(
        Gate,
        access=access or Access(),
        hosts=hosts or HostRules(),
        queue_refusal=served_requests.refusal,
        is_beside_run=lambda: driver.num_runs > 0,
        max_body_bytes=max_body_bytes,
        refuse_full=too_many_requests,
        connections=connections,
    )
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["Authorization", "Content-Type"]
        )
    _document_400_for_422(app)
    return app


def _document_400_for_422(app: FastAPI) -> None:
    """Remove 422 from the OpenAPI schema: FastAPI documents it for invalid bodies, but this server answers 400."""
    schema: dict[str, Any] = app.openapi()
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
