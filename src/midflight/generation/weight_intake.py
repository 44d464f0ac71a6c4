"""The server's end of weight updates: joins the sender's process group and hands the tensors to the engine.

consumes       tensors, in a thread of its own, while the engine keeps decoding
waits for      the whole group; one tensor after another
unblocked by   each of them, a timeout, a lost peer, close
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from midflight.concurrency.background import run_in_background
from midflight.errors import WeightUpdateError
from midflight.generation.driver import GeneratorDriver
from midflight.generation.http_errors import ApiError
from midflight.generation.schemas import InitProcessGroupResponse, WeightUpdateRequest, WeightUpdateResponse
from midflight.generation.weight_hosts import WeightHosts
from midflight.protocols import IncomingWeights
from midflight.types import TensorSpec
from midflight.weights.group_receiver import ProcessGroupReceiver
from midflight.weights.process_group import Announcement, Invitation
from midflight.weights.progress import Progress
from midflight.weights.specs import num_bytes

_WIND_DOWN_S = 1.0  # longest wait for a receive that has been ended


class WeightIntake:
    """Receiver of weight updates in the server. An invitation ends earlier invitations and a receive under way.

    `expected`: the tensors of the model; an announcement of other tensors is refused before anything is received.
    """

    def __init__(
        self,
        driver: GeneratorDriver,
        expected: Sequence[TensorSpec],
        device: str = "cpu",
        hosts: WeightHosts | None = None,
    ) -> None:
        """Start without a process group. `hosts`: that invitations may name; default: the client that sends one."""
        self._driver, self._device, self._hosts = driver, device, hosts or WeightHosts()
        self._expected = {spec.name: spec for spec in expected}
        self.backends = ["tcp"] if device == "cpu" else ["tcp", "nccl"]  # of process groups that it can join
        self._receiver: ProcessGroupReceiver | None = None
        self._replacing = threading.Lock()
        self._newest: Invitation | None = None
        self._receiving = asyncio.Lock()

    async def join(self, invitation: Invitation, client: str | None) -> InitProcessGroupResponse:
        """Join a process group; leave the previous one. `client`: address that the invitation comes from.

        Raises: WeightUpdateError if the group is not complete in time, or if a newer invitation comes meanwhile;
        ApiError 403 if the invitation names a host that is not allowed.
        """
        return await asyncio.wrap_future(run_in_background(lambda: self._join(invitation, client)))

    async def receive(self, body: WeightUpdateRequest) -> WeightUpdateResponse:
        """Receive announced weights and stage them; if the request says so, return when they are in use.

        Raises: WeightUpdateError if the weights do not fit or do not arrive, ApiError 409 if the tensors of `content`
        are unknown, or if another receive is going on; the old weights then stay in use.
        """
        try:
            async with asyncio.timeout(_WIND_DOWN_S):  # a receive that an invitation has ended needs a moment
                await self._receiving.acquire()
        except TimeoutError:
            text = "another weight update is going on; try again later"
            raise ApiError(409, text, code="update_in_progress") from None
        try:
            return await asyncio.wrap_future(run_in_background(lambda: self._receive(body)))
        finally:
            self._receiving.release()

    def close(self) -> None:
        """Leave the process group; a receive that is going on fails."""
        self._replace(None)

    @property
    def progress(self) -> Progress:
        """State of the last or running receive."""
        return self._receiver.progress() if self._receiver else Progress()

    def _join(self, invitation: Invitation, client: str | None) -> InitProcessGroupResponse:
        address = self._hosts.address_of(invitation.master_address, invitation.master_port, client)
        self._newest = invitation
        self.close()
        receiver = ProcessGroupReceiver(invitation, self._device, address)
        if self._newest is not invitation:
            receiver.close()
            raise WeightUpdateError("a newer invitation has replaced this one")
        self._replace(receiver)
        return InitProcessGroupResponse(rank=receiver.rank, world_size=receiver.world_size)

    def _replace(self, receiver: ProcessGroupReceiver | None) -> None:
        with self._replacing:
            previous, self._receiver = self._receiver, receiver
        if previous is not None:
            previous.close()

    def _receive(self, body: WeightUpdateRequest) -> WeightUpdateResponse:
        started_s = time.perf_counter()
        specs = self._check(body)
        content = body.version if body.content is None else body.content
        tensors = self._arriving(body, specs) if specs else self._known(body.lineage, content)
        self._driver.stage(IncomingWeights(body.version, content, tensors, lineage=body.lineage))
        for _ in tensors:  # the engine takes none if it has these tensors, but the transfer must end
            pass
        pause_s = 0.0
        if body.adopt:
            self._driver.adopt(body.lineage, body.version).result()
            pause_s = self._driver.counters.update_pause_s
        return WeightUpdateResponse(
            version=body.version,
            pause_s=pause_s,
            seconds=time.perf_counter() - started_s,
            bytes=sum(map(num_bytes, specs)),
        )

    def _arriving(self, body: WeightUpdateRequest, specs: tuple[TensorSpec, ...]) -> Iterator[tuple[str, Tensor]]:
        if self._receiver is None or not self._receiver.is_open:
            raise WeightUpdateError("there is no process group; POST /init_process_group first")
        return self._receiver.tensors(Announcement(body.version, specs, body.bucket_bytes))

    def _known(self, lineage: str, content: int) -> Iterator[tuple[str, Tensor]]:
        """Check that the engine has tensors of this content; nothing is received then."""
        for weights in (self._driver.active, self._driver.staged):
            if weights and (weights.lineage, weights.content) == (lineage, content):
                return iter(())
        raise ApiError(409, f"this server has no weights with content {content}; send them", code="content_unknown")

    def _check(self, body: WeightUpdateRequest) -> tuple[TensorSpec, ...]:
        active = self._driver.active
        if body.lineage == active.lineage and body.version < active.version + body.adopt:
            raise WeightUpdateError(
                f"version {body.version} is not newer than version {active.version}, which serves; send a newer version"
                " or another lineage"
            )
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise WeightUpdateError(
                f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes were announced;"
                " announce one of each per tensor"
            )
        specs = tuple(map(TensorSpec, body.names, map(tuple, body.shapes), body.dtypes))
        if not specs:
            return specs
        missing, extra = self._expected.keys() - set(body.names), set(body.names) - self._expected.keys()
        if missing:
            raise _misfit(f"the announced weights lack {min(missing)!r}")
        if extra:
            raise _misfit(f"the model has no tensor {min(extra)!r}")
        if len(specs) > len(self._expected):
            raise _misfit(f"a tensor is announced twice: {len(specs)} names, {len(self._expected)} tensors")
        for spec in specs:
            expected = self._expected[spec.name]
            if spec != expected:
                raise _misfit(
                    f"tensor {spec.name!r} is announced as {spec.dtype} {list(spec.shape)}, not"
                    f" {expected.dtype} {list(expected.shape)}"
                )
        return specs


def _misfit(message: str) -> ApiError:
    return ApiError(400, message, kind="weight_update_error", code="weights_do_not_fit")
