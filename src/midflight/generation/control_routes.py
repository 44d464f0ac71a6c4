"""Control routes: abort, pause, resume, health, metrics, and weight updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse

from midflight.concurrency.background import run_in_background
from midflight.errors import WeightUpdateError
from midflight.generation.driver import GeneratorDriver
from midflight.generation.http_errors import ERROR_RESPONSES, ApiError, require_admin
from midflight.generation.responses import finite_or_none
from midflight.generation.schemas import (
    AbortedRollout,
    AbortRequest,
    AbortResponse,
    InitProcessGroupRequest,
    InitProcessGroupResponse,
    Status,
    WeightUpdateRequest,
    WeightUpdateResponse,
    lists_of,
)
from midflight.types import RolloutId, TensorSpec
from midflight.weights.process_group import Announcement, Invitation, ProcessGroupReceiver
from midflight.weights.specs import num_bytes

T = TypeVar("T")


def control_router(driver: GeneratorDriver, weights: WeightIntake) -> APIRouter:
    """Create the control routes except /metrics. All but /health need the admin token."""
    router = APIRouter(tags=["control"], responses=ERROR_RESPONSES)
    admin = [Depends(require_admin)]

    def status() -> Status:
        return Status(
            status="paused" if driver.paused else "ok",
            weight_version=driver.weight_version,
            in_flight=driver.num_in_flight,
        )

    @router.get("/health", response_model=Status)
    async def health() -> Status:
        """Return the state of generation; 503 once generation has failed."""
        if driver.failure:
            raise ApiError(503, str(driver.failure), code="generation_failed")
        return status()

    @router.post("/abort", response_model=AbortResponse, dependencies=admin)
    async def abort(body: AbortRequest) -> AbortResponse:
        """Stop these rollouts and return the tokens they generated; ids that are not in flight are ignored."""
        completions = await asyncio.wrap_future(driver.abort([RolloutId(number) for number in body.rollout_ids]))
        aborted = []
        for completion in completions:
            tokens = lists_of(completion.generated) | {"logprobs": finite_or_none(completion.generated.logprobs)}
            aborted.append(AbortedRollout(rollout_id=completion.rollout_id, **tokens))
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
    async def init_process_group(body: InitProcessGroupRequest) -> InitProcessGroupResponse:
        """Join the process group that new weights will be sent over; leave the previous group."""
        if body.rank >= body.world_size:
            raise ApiError(400, f"rank is {body.rank}, not 1 to {body.world_size - 1}", param="rank")
        await weights.run_exclusive(lambda: weights.join(Invitation(**body.model_dump())))
        return InitProcessGroupResponse(rank=body.rank, world_size=body.world_size)

    @router.post("/request_weight_update", response_model=WeightUpdateResponse, dependencies=admin)
    async def request_weight_update(body: WeightUpdateRequest) -> WeightUpdateResponse:
        """Receive the announced tensors while decoding continues, then swap them in between two steps."""
        return await weights.run_exclusive(lambda: weights.update(body))

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


class WeightIntake:
    """Receiver of weight updates in the server. `join` and `update` block; `run_exclusive` runs them in a thread.

    `expected`: the tensors of the model; an announcement of other tensors is refused before anything is received.
    """

    def __init__(self, driver: GeneratorDriver, expected: Sequence[TensorSpec], device: str = "cpu") -> None:
        self._driver, self._device = driver, device
        self._expected = {spec.name: spec.shape for spec in expected}
        self._receiver: ProcessGroupReceiver | None = None
        self._lock = asyncio.Lock()

    async def run_exclusive(self, function: Callable[[], T]) -> T:
        """Run a blocking call in a thread and return its result.

        Raises: ApiError 409 if another update or join is going on.
        """
        if self._lock.locked():
            raise ApiError(409, "another weight update is going on; try again later", code="update_in_progress")
        async with self._lock:
            return await asyncio.wrap_future(run_in_background(function))

    def join(self, invitation: Invitation) -> None:
        """Join a process group; leave the previous one.

        Raises: WeightUpdateError if the group is not complete in time.
        """
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._receiver = ProcessGroupReceiver(invitation, self._device)

    def update(self, body: WeightUpdateRequest) -> WeightUpdateResponse:
        """Receive announced weights and swap them in.

        Raises: WeightUpdateError; the old weights then stay in use.
        """
        started_s = time.perf_counter()
        specs = self._check(body)
        if self._receiver is None:
            raise WeightUpdateError("there is no process group; POST /init_process_group first")
        try:
            received = self._receiver.receive(Announcement(body.version, specs, body.bucket_bytes))
        except WeightUpdateError:
            self._receiver = None
            raise
        pause_s = self._driver.update_weights(body.version, received).result()
        return WeightUpdateResponse(
            version=body.version,
            pause_s=pause_s,
            seconds=time.perf_counter() - started_s,
            bytes=sum(map(num_bytes, specs)),
        )

    def _check(self, body: WeightUpdateRequest) -> tuple[TensorSpec, ...]:
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise WeightUpdateError(
                f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes were announced;"
                " announce one of each per tensor"
            )
        specs = tuple(map(TensorSpec, body.names, map(tuple, body.shapes), body.dtypes))
        missing, extra = self._expected.keys() - set(body.names), set(body.names) - self._expected.keys()
        if missing:
            raise WeightUpdateError(f"the announced weights lack {min(missing)!r}")
        if extra:
            raise WeightUpdateError(f"the model has no tensor {min(extra)!r}")
        for spec in specs:
            if spec.shape != self._expected[spec.name]:
                expected = list(self._expected[spec.name])
                raise WeightUpdateError(f"tensor {spec.name!r} is announced as {list(spec.shape)}, not {expected}")
            num_bytes(spec)  # raises if the dtype cannot be sent
        return specs


_METRICS: tuple[tuple[str, str, str, Callable[[GeneratorDriver], float]], ...] = (
    ("requests_in_flight", "gauge", "Sequences in flight", lambda driver: driver.num_in_flight),
    ("requests_finished_total", "counter", "Sequences finished", lambda driver: driver.counters.finished),
    ("requests_aborted_total", "counter", "Sequences aborted", lambda driver: driver.counters.aborted),
    ("generated_tokens_total", "counter", "Tokens sampled", lambda driver: driver.counters.generated_tokens),
    ("weight_version", "gauge", "Optimizer steps that made the weights", lambda driver: driver.weight_version),
    ("weight_updates_total", "counter", "Weight updates", lambda driver: driver.counters.updates),
    ("weight_update_pause_seconds", "gauge", "Pause of the last update", lambda driver: driver.counters.update_pause_s),
    ("paused", "gauge", "1 while paused", lambda driver: float(driver.paused)),
    ("failed", "gauge", "1 once generation has failed", lambda driver: float(driver.failure is not None)),
)
