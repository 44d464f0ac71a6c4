"""A server's weight version, and the request that it adopts a newer one.

consumes       the answers to POST /adopt; the versions of streamed tokens
waits for      an answer, in the event loop of the generator
unblocked by   the adoption; a lost connection, after which the request is repeated; the client's end
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

import httpx

from midflight.concurrency.event_loop import Coroutines
from midflight.errors import GenerationError, MidflightError, WeightUpdateError
from midflight.generation.answers import reason_of, refusal_of
from midflight.generation.schemas import AdoptResponse
from midflight.protocols import NO_VERSION

RETRY_S = 1.0
REPEAT_S = 5.0  # a request without an answer is repeated: its connection may have been lost without a sign

_log = logging.getLogger(__name__)


class Adoption:
    """The newest version that a server is asked for. One request at a time: an answer may bring newer weights.

    `weight_version`: version that the server samples with, as far as its answers tell; never decreases.
    `notify`: called when the version has changed or the server has refused.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        coroutines: Coroutines,
        lineage: str | None,
        timeout_s: float,
        notify: Callable[[], object],
    ) -> None:
        self.weight_version = self._wanted = NO_VERSION
        self._http, self._coroutines = http, coroutines
        self._lineage, self._timeout_s, self._notify = lineage, timeout_s, notify
        self._is_asking = False
        self._failure: MidflightError | None = None

    def ask(self, version: int) -> None:
        """Ask for this version, unless a newer one is asked for already. Returns at once."""
        if version > self.weight_version:
            self._coroutines.submit(self._ask(version))

    def learn(self, version: int) -> None:
        """Note that the server samples with this version."""
        if version > self.weight_version:
            self.weight_version = version
            self._notify()

    def take_failure(self) -> MidflightError | None:
        """Return the server's refusal, once."""
        failure, self._failure = self._failure, None
        return failure

    async def _ask(self, version: int) -> None:
        self._wanted = max(self._wanted, version)
        if self._is_asking:
            return
        self._is_asking = True
        try:
            while self.weight_version < self._wanted:
                await self._ask_once(self._wanted)
        except MidflightError as error:
            self._failure = error
            self._notify()
        finally:
            self._is_asking = False

    async def _ask_once(self, version: int) -> None:
        timeout = httpx.Timeout(self._timeout_s, read=min(self._timeout_s, REPEAT_S))
        body = {"version": version} | ({} if self._lineage is None else {"lineage": self._lineage})
        try:
            response = await self._http.post("/adopt", json=body, timeout=timeout)
            if response.is_success:
                self.learn(AdoptResponse.model_validate(response.json()).version)
                return
            refusal = refusal_of(response)
        except httpx.ReadTimeout:
            return
        except (httpx.HTTPError, ValueError) as error:
            _log.info("%s/adopt: %s", self._http.base_url, reason_of(error))
            await asyncio.sleep(RETRY_S)
            return
        if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE or isinstance(refusal, WeightUpdateError):
            _log.warning("%s/adopt: version %d: %s", self._http.base_url, version, refusal)
            await asyncio.sleep(RETRY_S)
            return
        raise GenerationError(f"it does not adopt version {version}: {refusal}")
