"""The servers that generate for a run: found in the run's registry, connected, and retried when they are lost.

consumes       the files of the registry, about once a second
waits for      nothing; connections are opened in background threads
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from midflight.concurrency.background import run_in_background
from midflight.concurrency.event_loop import EventLoopThread
from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.config.sections import HttpEngineConfig
from midflight.errors import MidflightError, ModelError, RequestError
from midflight.generation.client import HTTPGenerator
from midflight.generation.members import PATIENCE_S
from midflight.generation.news import News
from midflight.generation.pool import EnginePool, PoolHooks
from midflight.generation.registry import Entry, read_entries
from midflight.models.loading import load_config
from midflight.types import GenerationRequest
from midflight.weights.engine_control import TOKEN_VARIABLE

READ_S = 1.0  # interval between two reads of the registry
LOOK_S = 0.05  # interval between two looks at the connections
# First and last delay between two attempts to connect; the delay doubles after each failure.
BACKOFF_S = (1.0, 60.0)
# Interval between two probes of a server: a server that hangs reports no error by itself.
PROBE_S = 10.0
# Timeout of an HTTP answer.
_ANSWER_TIMEOUT_S = 30.0
# Patience with servers that load new weights themselves, each in its own time.
_LOADING_PATIENCE_S = 30.0

# Connects to the server at a URL; the function is called when the server has news.
Connect = Callable[[str, Callable[[], object]], HTTPGenerator]


@contextmanager
def server_pool(
    recipe: Recipe, run: RunDirectory, version: int, lineage: str, note: Callable[[str], object]
) -> Iterator[EnginePool]:
    """Open the pool of a run's servers, which sample with `version` or newer weights of this lineage.

    `note`: receives lines for the user.
    """
    assert isinstance(recipe.engine, HttpEngineConfig)
    news, loop = News(), EventLoopThread("servers")
    servers = Servers(run.engines, functools.partial(connect, recipe, lineage, loop), news, note)
    pool = EnginePool(
        version,
        run=run_in_background,
        news=news,
        hooks=PoolHooks(servers.discover, servers.log, servers.left, functools.partial(_check, recipe)),
        patience_s=PATIENCE_S if recipe.weights.type == "process_group" else _LOADING_PATIENCE_S,
        join_timeout_s=recipe.engine.join_timeout_s,
    )
    if not read_entries(run.engines):
        note(f"waiting for an engine; to start one: midflight serve {run.config} --join {run.path} serve.port=0")
    with closing(loop), closing(pool):
        yield pool


def connect(
    recipe: Recipe, lineage: str, loop: EventLoopThread, url: str, notify: Callable[[], object]
) -> HTTPGenerator:
    """Connect to a server. `lineage`: the lineage of the run's weights.

    Raises: GenerationLostError if the server cannot be reached; ModelError if its model or limits do not fit the run.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    generator = HTTPGenerator(
        url, admin_token=token, timeout_s=_ANSWER_TIMEOUT_S, notify=notify, lineage=lineage, loop=loop
    )
    try:
        _check_fits(recipe, generator)
    except BaseException:
        generator.close()
        raise
    return generator


@dataclass(slots=True)
class _Candidate:
    """A server of the registry, and the state of its connection."""

    entry: Entry
    attempt: Future[HTTPGenerator] | None = None
    is_member: bool = False
    retry_at_s: float = 0.0
    delay_s: float = BACKOFF_S[0]  # between the next failure and the next attempt


@dataclass(slots=True)
class _Probe:
    generator: HTTPGenerator
    due_s: float
    answer: Future[None] | None = None


class Servers:
    """Keeps the members of a pool in line with a registry."""

    def __init__(
        self,
        directory: Path,
        connect: Connect,
        news: News,
        note: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no servers. `news`: of the pool."""
        self._directory, self._connect, self._news, self._note = directory, connect, news, note
        self._clock = clock
        self._candidates: dict[str, _Candidate] = {}
        self._probes: dict[str, _Probe] = {}
        self._last_logged: dict[str, str] = {}
        self._next_look_s = self._next_read_s = -math.inf

    def discover(self, pool: EnginePool) -> None:
        """Let servers join and leave the pool. Cheap: most calls do nothing."""
        now_s = self._clock()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        if now_s >= self._next_read_s:
            self._next_read_s = now_s + READ_S
            self._read_registry(pool)
        members = pool.names
        for name, candidate in self._candidates.items():
            if name not in members:
                self._advance_attempt(name, candidate, pool, now_s)
            elif pool.has_served(name):
                candidate.delay_s = BACKOFF_S[0]
        members = pool.names
        for name, probe in list(self._probes.items()):
            if name in members:
                self._continue_probe(name, probe, pool, now_s)
            else:
                del self._probes[name]

    def log(self, name: str, text: str) -> None:
        """Tell the user about a server, unless the last line about this server was the same."""
        if self._last_logged.get(name) != text:
            self._last_logged[name] = text
            self._note(f"engine {name} {text}")

    def left(self, name: str, text: str) -> None:
        """Tell the user that a member has left, and when the next attempt to connect is."""
        candidate = self._candidates.get(name)
        if candidate is None or not candidate.is_member:  # removed from the registry, or restarted
            self.log(name, text)
            return
        candidate.is_member = False
        self._retry_later(name, candidate, text)

    def _retry_later(self, name: str, candidate: _Candidate, why: str) -> None:
        self._last_logged.pop(name, None)  # so that every failed attempt is logged
        self.log(name, f"{why}; next attempt in {candidate.delay_s:g} s")
        candidate.retry_at_s = self._clock() + candidate.delay_s
        candidate.delay_s = min(BACKOFF_S[1], 2 * candidate.delay_s)

    def _read_registry(self, pool: EnginePool) -> None:
        entries = read_entries(self._directory)
        for name, candidate in list(self._candidates.items()):
            if entries.get(name) != candidate.entry:
                del self._candidates[name]
                pool.leave(name, "it was restarted" if entries.get(name) else "it was removed from the registry")
                if candidate.attempt is not None:
                    candidate.attempt.add_done_callback(_close_result)
        for name, entry in entries.items():
            if entry is None:
                self.log(name, f'is left out: {self._directory / name}.json is not {{"url": "http://..."}}')
            elif name not in self._candidates:
                self._candidates[name] = _Candidate(entry)

    def _advance_attempt(self, name: str, candidate: _Candidate, pool: EnginePool, now_s: float) -> None:
        if candidate.attempt is None:
            if now_s >= candidate.retry_at_s:
                notify = self._news.notifier(name)
                candidate.attempt = run_in_background(functools.partial(self._connect, candidate.entry.url, notify))
        elif candidate.attempt.done():
            attempt, candidate.attempt = candidate.attempt, None
            self._finish_attempt(name, candidate, attempt, pool, now_s)

    def _finish_attempt(
        self, name: str, candidate: _Candidate, attempt: Future[HTTPGenerator], pool: EnginePool, now_s: float
    ) -> None:
        try:
            generator = attempt.result()
        except (ModelError, RequestError) as error:
            self.log(name, f"is left out: {error}")
            candidate.retry_at_s = math.inf
        except MidflightError as error:
            self._retry_later(name, candidate, f"cannot be reached: {error}")
        else:
            candidate.is_member = True
            self._probes[name] = _Probe(generator, now_s + PROBE_S)
            pool.join(name, generator, generator.close, generator.num_slots)

    def _continue_probe(self, name: str, probe: _Probe, pool: EnginePool, now_s: float) -> None:
        if probe.answer is None:
            if now_s >= probe.due_s:
                probe.answer = run_in_background(probe.generator.check_health)
        elif probe.answer.done():
            error, probe.answer = probe.answer.exception(), None
            probe.due_s = now_s + PROBE_S
            if error is not None:
                pool.lose(name, str(error))


def _close_result(attempt: Future[HTTPGenerator]) -> None:
    if attempt.exception() is None:
        attempt.result().close()


def _check_fits(recipe: Recipe, generator: HTTPGenerator) -> None:
    limits = generator.limits()
    vocab_size = load_config(recipe.model.path).vocab_size
    if limits.vocab_size != vocab_size:
        raise ModelError(
            f"its model has a vocabulary of {limits.vocab_size} tokens, and that of model.path = {recipe.model.path}"
            f" has {vocab_size}"
        )
    if limits.max_length < recipe.max_engine_length:
        raise ModelError(
            f"it takes sequences of up to {limits.max_length} tokens, and engine.max_prompt_tokens + the largest"
            f" max_tokens of the recipe = {recipe.max_engine_length}"
        )


def _check(recipe: Recipe, request: GenerationRequest) -> None:
    """Check the prompt of a request. Raises: RequestError if it is empty or longer than the recipe allows."""
    num_tokens, longest = len(request.prompt_token_ids), recipe.engine.max_prompt_tokens
    if request.first_position:
        longest = recipe.max_engine_length - request.sampling.max_tokens
    if not 0 < num_tokens <= longest:
        raise RequestError(f"request {request.rollout_id}: its prompt has {num_tokens} tokens, not 1 to {longest}")
