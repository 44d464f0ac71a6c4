"""Control routes: abort, pause, resume, health, metrics, and weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response

from midflight.generation.disconnects import CLIENT_CLOSED_REQUEST, unless_disconnected
from midflight.generation.driver import GeneratorDriver
from midflight.generation.http_errors import ERROR_RESPONSES, ApiError, require_admin
from midflight.generation.responses import finite_or_none
from midflight.generation.schemas import (
    AbortedRollout,
    AbortRequest,
    AbortResponse,
    AdoptRequest,
    AdoptResponse,
    InitProcessGroupRequest,
    InitProcessGroupResponse,
    Status,
    WeightUpdateRequest,
    WeightUpdateResponse,
    lists_of,
)
from midflight.generation.served_requests import ServedRequests
from midflight.generation.weight_intake import WeightIntake
from midflight.generation.weight_pull import WeightPull
from midflight.types import RolloutId
from midflight.weights.engine_control import PROTOCOL
from midflight.weights.process_group import Invitation
from midflight.weights.progress import Progress


def control_router(
    driver: GeneratorDriver, served_requests: ServedRequests, weights: WeightIntake, pull: WeightPull | None = None
) -> APIRouter:
    """Create the control routes except /metrics. All but the GET routes need the admin token."""
    router = APIRouter(tags=["control"], responses=ERROR_RESPONSES)
    admin = [Depends(require_admin)]

    def status() -> Status:
        active, staged = driver.active, driver.staged
        return Status(
            status="paused" if driver.paused else "ok",
            in_flight=driver.num_in_flight,
            num_slots=driver.num_slots,
            backends=weights.backends,
            weight_version=active.version,
            lineage=active.lineage,
            content=active.content,
            staged_version=staged and staged.version,
            staged_lineage=staged and staged.lineage,
            staged_content=staged and staged.content,
        )

    @router.get("/health", response_model=Status)
    async def health() -> Status:
        """Return the state of generation; 503 once generation has failed."""
        if driver.failure:
            raise ApiError(503, str(driver.failure), code="generation_failed")
        return status()

    @router.post("/abort", response_model=AbortResponse, dependencies=admin)
    async def abort(body: AbortRequest) -> AbortResponse:
        """Stop these rollouts of the OpenAI routes and return their tokens; ids that are not in flight are ignored."""
        ids = served_requests.ids(RolloutId(number) for number in dict.fromkeys(body.rollout_ids))
        completions = await asyncio.wrap_future(driver.abort(list(ids)))
        aborted = []
        for completion in completions:
            tokens = lists_of(completion.generated) | {"logprobs": finite_or_none(completion.generated.logprobs)}
            aborted.append(AbortedRollout(rollout_id=ids[completion.rollout_id], **tokens))
        return AbortResponse(aborted=aborted)

    @router.post("/pause", response_model=Status, dependencies=admin)
    async def pause() -> Status:
        """Stop sampling. Requests in flight stay in flight, and new requests are accepted."""
        await asyncio.wrap_future(driver.pause())
        return status()

    @router.post("/resume", response_model=Status, dependencies=admin)
    async def resume() -> Status:
        """Continue sampling."""
        await asyncio.wrap_future(driver.resume())
        return status()

    @router.post("/init_process_group", response_model=InitProcessGroupResponse, dependencies=admin)
    async def init_process_group(body: InitProcessGroupRequest, request: Request) -> InitProcessGroupResponse:
        """Join the process group that new weights will be sent over; leave the previous group."""
        if body.rank >= body.world_size:
            raise ApiError(400, f"rank is {body.rank}, not 1 to {body.world_size - 1}", param="rank")
        if body.protocol != PROTOCOL:
            raise ApiError(
                400,
                f"the sender follows version {body.protocol} of the protocol, and this server version {PROTOCOL};"
                " install the same midflight for both",
                param="protocol",
            )
        invitation = Invitation(**body.model_dump(exclude={"protocol"}))
        return await weights.join(invitation, request.client and request.client.host)

    @router.post("/request_weight_update", response_model=WeightUpdateResponse, dependencies=admin)
    async def request_weight_update(body: WeightUpdateRequest) -> WeightUpdateResponse:
        """Receive the announced tensors while decoding continues; swap them in between two steps if `adopt` is set."""
        return await weights.receive(body)

    @router.get("/weights", response_model=Progress)
    async def weight_progress() -> Progress:
        """Return the state of the last or running receive; all counts are in bytes."""
        return weights.progress

    @router.post("/adopt", response_model=AdoptResponse, dependencies=admin)
    async def adopt(body: AdoptRequest, request: Request) -> AdoptResponse | Response:
        """Answer when the server samples with this version or a newer one of the lineage. A disconnect cancels nothing.

        The weights arrive on their own, so the answer may take long.
        """
        lineage = driver.active.lineage if body.lineage is None else body.lineage
        if pull is not None:
            pull.want(lineage, body.version)
        adopted = asyncio.wrap_future(driver.adopt(lineage, body.version))
        used = await unless_disconnected(request, asyncio.shield(adopted))
        return (
            AdoptResponse(version=used.version, lineage=used.lineage)
            if used
            else Response(status_code=CLIENT_CLOSED_REQUEST)
        )

    return router


def metrics_router(driver: GeneratorDriver) -> APIRouter:
    """Create the route /metrics."""
    router = APIRouter(tags=["control"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Return the metrics of this server in the Prometheus text format."""
        return "".join(
            f"# HELP midflight_{name} {text}\n# TYPE midflight_{name} {kind}\nmidflight_{name} {read(driver)}\n"
            for name, kind, text, read in _METRICS
        )

    return router


_METRICS: tuple[tuple[str, str, str, Callable[[GeneratorDriver], float]], ...] = (
    ("requests_in_flight", "gauge", "Sequences in flight", lambda driver: driver.num_in_flight),
    ("requests_finished_total", "counter", "Sequences finished", lambda driver: driver.counters.finished),
    ("requests_aborted_total", "counter", "Sequences aborted", lambda driver: driver.counters.aborted),
    ("generated_tokens_total", "counter", "Tokens sampled", lambda driver: driver.counters.generated_tokens),
    ("weight_version", "gauge", "Optimizer steps that made the weights", lambda driver: driver.active.version),
    ("weight_updates_total", "counter", "Weight updates", lambda driver: driver.counters.updates),
    ("weight_update_pause_seconds", "gauge", "Step of the last update", lambda driver: driver.counters.update_pause_s),
    ("paused", "gauge", "1 while paused", lambda driver: float(driver.paused)),
    ("failed", "gauge", "1 once generation has failed", lambda driver: float(driver.failure is not None)),
)
