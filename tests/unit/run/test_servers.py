"""Servers of a run's registry join its engine pool, leave it, and are retried."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import GenerationError, GenerationLostError, ModelError, RecipeError, RunDirectoryError
from midflight.generation.news import News
from midflight.generation.pool import EnginePool, PoolHooks
from midflight.generation.registry import read_entries
from midflight.run import servers
from midflight.run.directory import create_run
from midflight.run.engine_registry import Registration
from midflight.run.servers import BACKOFF_S, PROBE_S, READ_S, Connect, Servers
from midflight.testing.fakes import ScriptedGenerator
from midflight.types import Completion, GenerationRequest, RolloutId, SamplingParams

RECIPE = SHIPPED_RECIPES["cpu_demo"]


class Connected(ScriptedGenerator):
    """Client of a server; `refusal` is the server's answer to `adopt`."""

    hangs = False
    num_slots = None

    def __init__(self, url: str, refusal: Exception | None) -> None:
        super().__init__(lambda rollout: 5)
        self.url, self.refusal, self.is_closed = url, refusal, False

    def check_health(self) -> None:
        if self.hangs:
            raise GenerationLostError("no answer")

    def step(self) -> list[Completion]:
        if self.refusal is not None and not self.num_in_flight:
            raise self.refusal
        return super().step()

    def close(self) -> None:
        self.is_closed = True


class Controls:
    """Servers that can be reached or not, connection attempts that end at once or on request, and a clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir()
        self.directory, self.now_s, self.notes = directory, 0.0, list[str]()
        self.errors: dict[str, Exception] = {}  # by URL: the error of a connection attempt
        self.attempts: list[str] = []
        self.connected: list[Connected] = []
        self.held: list[Callable[[], None]] | None = None  # connection attempts to finish on request; None: at once
        self.refusal: Exception | None = None  # to adopt weights, by servers that are connected from now on
        monkeypatch.setattr(servers, "run_in_background", self._run)
        monkeypatch.setattr(servers, "LOOK_S", 0.0)  # look at every step
        connect = cast(Connect, self._connect)
        self.servers = Servers(directory, connect, News(), self.notes.append, lambda: self.now_s)
        hooks = PoolHooks(self.servers.discover, self.servers.log, self.servers.left)
        self.pool = EnginePool(0, hooks=hooks)

    def write(self, name: str, url: str, at: int = 1) -> None:
        path = self.directory / f"{name}.json"
        path.write_text(json.dumps({"url": url}))
        os.utime(path, ns=(at, at))

    def discover(self, after_s: float = READ_S) -> frozenset[str]:
        """Advance the clock and step twice: the second step sees the attempts that ended in the first."""
        self.now_s += after_s
        self.pool.step()
        self.pool.step()
        return self.pool.names

    def _connect(self, url: str, notify: Callable[[], object]) -> Connected:
        self.attempts.append(url)
        if url in self.errors:
            raise self.errors[url]
        self.connected.append(Connected(url, self.refusal))
        return self.connected[-1]

    def _run(self, function):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()

        def carry_out() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if self.held is None:
            carry_out()
        else:
            self.held.append(carry_out)
        return future


@pytest.fixture
def controls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controls:
    return Controls(tmp_path / "engines", monkeypatch)


def test_registered_servers_join_and_removed_servers_leave(controls: Controls) -> None:
    assert controls.discover() == frozenset()
    controls.write("one", "http://one:1/")
    controls.write("two", "http://two:2")
    assert controls.discover() == {"one", "two"}
    assert controls.attempts == ["http://one:1", "http://two:2"]
    (controls.directory / "one.json").unlink()
    assert controls.discover(after_s=READ_S / 2) == {"one", "two"}
    assert controls.discover() == {"two"}
    assert [engine.is_closed for engine in controls.connected] == [True, False]
    assert controls.notes == [
        "engine one joined with weights of version 0",
        "engine two joined with weights of version 0",
        "engine one left: it was removed from the registry",
    ]


def test_unreachable_servers_are_retried_with_growing_delays(controls: Controls) -> None:
    controls.errors["http://one:1"] = GenerationLostError("connection refused")
    controls.write("one", "http://one:1")
    tried_at = []
    for _ in range(200):
        num_before = len(controls.attempts)
        controls.discover()
        tried_at += [controls.now_s] * (len(controls.attempts) - num_before)
    waits = [later - earlier for earlier, later in itertools.pairwise(tried_at)]
    assert waits[:6] == [1, 2, 4, 8, 16, 32]
    assert set(waits[6:]) == {BACKOFF_S[1]}
    refused = "engine one cannot be reached: connection refused; next attempt in"
    assert controls.notes[:2] == [f"{refused} 1 s", f"{refused} 2 s"]
    assert controls.notes[-2:] == [f"{refused} 60 s"] * 2
    del controls.errors["http://one:1"]
    assert controls.discover(BACKOFF_S[1]) == {"one"}


def test_servers_that_refuse_to_adopt_are_retried_with_growing_delays(controls: Controls) -> None:
    """The server can be reached every time."""
    controls.refusal = GenerationError("it does not adopt version 0: the admin token is wrong")
    controls.write("one", "http://one:1")
    while len(controls.attempts) < 9:
        controls.discover()
    controls.discover()
    refused = "engine one left: it does not adopt version 0: the admin token is wrong; next attempt in"
    assert [note for note in controls.notes if "joined" not in note] == [
        f"{refused} {delay} s" for delay in (1, 2, 4, 8, 16, 32, 60, 60, 60)
    ]
    controls.refusal = None
    assert controls.discover(BACKOFF_S[1]) == {"one"}
    controls.pool.lose("one", "it hangs")
    assert controls.notes[-1] == "engine one left: it hangs; next attempt in 60 s"
    assert controls.discover(BACKOFF_S[1]) == {"one"}
    controls.pool.add([GenerationRequest(RolloutId(0), np.array([1], np.int32), SamplingParams(8), seed=0)])
    while controls.pool.num_in_flight:
        controls.discover()
    controls.discover()
    controls.pool.lose("one", "it hangs")
    assert controls.notes[-1] == "engine one left: it hangs; next attempt in 1 s", "serving resets the delay"


def test_a_restarted_server_joins_without_delay(controls: Controls) -> None:
    controls.write("one", "http://one:1")
    controls.discover()
    controls.errors["http://one:1"] = GenerationLostError("connection refused")
    controls.write("one", "http://one:1", at=2)
    assert controls.discover() == frozenset()
    assert controls.notes[1:] == [
        "engine one left: it was restarted",
        "engine one cannot be reached: connection refused; next attempt in 1 s",
    ]
    del controls.errors["http://one:1"]
    controls.write("one", "http://one:1", at=3)
    assert controls.discover() == {"one"}


def test_an_unsuitable_server_is_retried_only_after_a_restart(controls: Controls) -> None:
    controls.errors["http://one:1"] = ModelError("its model has a vocabulary of 7 tokens")
    controls.write("one", "http://one:1")
    for _ in range(100):
        controls.discover()
    assert len(controls.attempts) == 1
    assert controls.notes == ["engine one is left out: its model has a vocabulary of 7 tokens"]
    controls.write("one", "http://one:1", at=2)
    controls.discover()
    assert len(controls.attempts) == 2


def test_a_hanging_server_is_removed(controls: Controls) -> None:
    """A probe detects the hang while no other call reaches the server, and while the server is leaving."""
    for name in ("one", "two"):
        controls.write(name, f"http://{name}:1")
    controls.discover()
    request = GenerationRequest(RolloutId(0), np.array([1], np.int32), SamplingParams(8), seed=0)
    controls.pool.add([request])
    for engine in controls.connected:
        engine.step = list  # type: ignore[method-assign]
    assert controls.discover(PROBE_S) == {"one", "two"}
    controls.connected[0].hangs = True
    (controls.directory / "one.json").unlink()
    assert controls.discover() == {"one", "two"}
    assert controls.discover(PROBE_S) == {"two"}
    assert controls.notes[-1] == "engine one left: no answer; 1 rollouts go on elsewhere"
    assert controls.connected[1].num_in_flight == 1


def test_invalid_entries_are_reported_once(controls: Controls) -> None:
    for index, text in enumerate(["{", "[]", '{"url": 7}', "{}"]):
        (controls.directory / f"{index}.json").write_text(text)
    (controls.directory / "x.json.partial").write_text("{")
    for _ in range(3):
        assert controls.discover() == frozenset()
    assert len(controls.notes) == 4
    assert controls.notes[0] == (
        f'engine 0 is left out: {controls.directory / "0.json"} is not {{"url": "http://..."}}'
    )


def test_a_connection_that_is_too_late_is_closed(controls: Controls) -> None:
    controls.held = []
    controls.write("one", "http://one:1")
    controls.discover()
    (controls.directory / "one.json").unlink()
    controls.discover()
    (carry_out,) = controls.held
    carry_out()
    assert controls.discover() == frozenset()
    assert [engine.is_closed for engine in controls.connected] == [True]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(load_recipe(RECIPE, ["engine.type=http", f"run.directory={tmp_path / 'run'}"]))


def test_a_server_registers_and_withdraws(run: RunDirectory) -> None:
    registration = Registration(run.path)
    registration.withdraw()
    registration.enter("http://127.0.0.1:8123")
    (entry,) = read_entries(run.engines).values()
    assert entry
    assert entry.url == "http://127.0.0.1:8123"
    again = Registration(run.path)
    again.enter("http://127.0.0.1:8123")
    assert len(read_entries(run.engines)) == 1
    again.withdraw()
    assert read_entries(run.engines) == {}
    registration.withdraw()


@pytest.mark.parametrize("url", ["http://0.0.0.0:8123", "http://[::]:8123"])
def test_a_server_on_all_addresses_registers_its_host_name(
    run: RunDirectory, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    Registration(run.path).enter(url)
    (entry,) = read_entries(run.engines).values()
    assert entry
    assert entry.url == "http://node7:8123"


def test_only_runs_with_http_engines_can_be_joined(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        Registration(tmp_path)
    run = create_run(load_recipe(RECIPE, [f"run.directory={tmp_path / 'run'}"]))
    with pytest.raises(RecipeError, match=r"engine\.type = 'http' would work"):
        Registration(run.path)
