"""A run with several servers behind proxies: every fault hits one of them, and the others must go on.

The checks read the servers directly, past the proxies, so that they see the state of a server that is cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from faults.policies import check_policies
from faults.runs import RECIPE, SETTINGS, TIMEOUT_S, Run, batches_of, num_lines, training
from faults.tcp_proxy import Connection, Effect, Place, ProxyLoop
from faults.weight_links import WeightLink
from midflight.config import load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.launch.engines import build_engine
from midflight.models.loading import load_config, load_model, weights_of
from midflight.trainer.checkpoints import checkpoint_of
from midflight.types import GenerationRequest, RolloutId, SamplingParams

WEIGHTS_TIMEOUT_S = 2.0
# Besides the timeout: the pool waits 3 s for engines that lack a version which few others have, forming a group has
# 0.5 s of grace, and everything runs on two cores that start processes besides.
MARGIN_S = 6.0
MAX_LAG = 6
NAMES = ("one", "two", "three")
REMOTE = (
    "engine.type=http",
    f"weights.timeout_s={WEIGHTS_TIMEOUT_S:g}",
    "weights.bucket_mib=1",  # three buckets: faults hit the first, the middle and the last one
    "schedule.type=pipeline",
    "schedule.num_in_flight=8",
    f"schedule.max_lag={MAX_LAG}",
    "supervisor.backoff_s=0.02",
    "supervisor.max_restarts=20",
    "trainer.checkpoint_every=6",  # a step takes a fraction of a second
    "task.grading_timeout_s=60",
)
PROMPT, NUM_TOKENS, SEED, ROLLOUT = [5, 6, 7, 8], 12, 3, 1_000_000  # an id that the run does not reach
_POLL_S = 0.02
_WATCH_S = 0.1


@dataclass(frozen=True)
class Reading:
    """State of a server."""

    version: int
    staged: int  # newest version whose tensors are there, at least `version`
    tokens: int  # sampled since the start of the server
    in_flight: int


class Server:
    """A `midflight serve` process of a run, registered by the address of its proxy."""

    def __init__(self, name: str, run: RunDirectory, loop: ProxyLoop, *overrides: str) -> None:
        self.name, self._run, self._overrides = name, run, overrides
        self.process = self._start()
        self._url = self._await_url()
        self.link = WeightLink(loop, self._address())
        self._client = httpx.Client(trust_env=False, timeout=0.5)
        self.register()

    def register(self, url: str | None = None) -> None:
        """Write the server's file in the registry of the run."""
        self._run.engines.mkdir(exist_ok=True)
        path = self._run.engines / f"{self.name}.json"
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps({"url": url or self.link.url}))
        unfinished.replace(path)

    def restart(self) -> None:
        """Replace a killed server by a new one, behind the same proxies."""
        self.kill()
        self.process = self._start()
        self._url = self._await_url()
        self.link.move(self._address())
        self.register()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def read(self) -> Reading | None:
        """Return the state of the server, or None if it does not answer."""
        try:
            health = self._client.get(f"{self._url}/health").json()
            lines = self._client.get(f"{self._url}/metrics").text.splitlines()
        except (httpx.HTTPError, ValueError):
            return None
        name = "midflight_generated_tokens_total "
        tokens = next(int(float(line.removeprefix(name))) for line in lines if line.startswith(name))
        version: int = health["weight_version"]
        return Reading(version, max(version, health["staged_version"] or 0), tokens, health["in_flight"])

    def sample(self) -> dict[str, Any]:
        """Sample a response to the fixed prompt; return its token ids, log-probabilities and weight versions."""
        body = {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "seed": SEED,
            "rollout_id": ROLLOUT,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": [],
        }
        answer = httpx.post(f"{self._url}/v1/completions", json=body, trust_env=False, timeout=TIMEOUT_S)
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        return {
            "token_ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "weight_versions": choice["weight_versions"],
        }

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.kill()
        self._client.close()

    def _start(self) -> subprocess.Popen[str]:
        arguments = ("serve", self._run.config, "serve.port=0", "engine.threads=1", *self._overrides)
        command = [sys.executable, "-m", "midflight", *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def _await_url(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("serving at "), line
        return line.removeprefix("serving at ").strip()

    def _address(self) -> tuple[str, int]:
        host, _, port = self._url.removeprefix("http://").partition(":")
        return host, int(port)


class TokenWatch:
    """Watches the tokens of all servers in a thread, to find the longest time in which none sampled one."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers, self._ended = servers, threading.Event()
        self._tokens: dict[str, int] = {}
        self._last_s = time.monotonic()
        self.longest_gap_s = 0.0
        self._threads = [threading.Thread(target=self._watch, args=(server,), daemon=True) for server in servers]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Forget the past."""
        self._last_s, self.longest_gap_s = time.monotonic(), 0.0

    def gap_s(self) -> float:
        """Longest time without a token since `begin`, the current one included."""
        return max(self.longest_gap_s, time.monotonic() - self._last_s)

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, server: Server) -> None:
        while not self._ended.wait(_WATCH_S):
            reading = server.read()
            if reading is not None and reading.tokens != self._tokens.get(server.name):
                self._tokens[server.name] = reading.tokens
                now_s = time.monotonic()
                self.longest_gap_s, self._last_s = max(self.longest_gap_s, now_s - self._last_s), now_s


@dataclass
class Fleet:
    """A run, its servers, and the proxies between them."""

    run: Run
    servers: list[Server]
    proxies: ProxyLoop
    watch: TokenWatch
    num_faults: int = 0

    # --- faults -----------------------------------------------------------------------------------------------

    def strike(self, name: str, place: Place, effect: Effect) -> Connection:
        """Arm a fault and wait until it strikes; return the connection that it struck."""
        self.watch.begin()
        fault = self.proxies.arm(place, effect)
        self.run.wait_until(fault.struck.is_set)
        self.tell(name)
        assert fault.connection is not None
        return fault.connection

    def tell(self, name: str) -> None:
        self.num_faults += 1
        print(f"fault: {name}", flush=True)

    def send(self, role: str, number: signal.Signals) -> Effect:
        """Return an effect that sends a signal to the trainer or the rollout process."""
        pid = self.run.pid(role)

        def effect(connection: Connection) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        return effect

    def resume(self, role: str) -> None:
        """Let a stopped process of the run go on."""
        os.kill(self.run.pid(role), signal.SIGCONT)

    # --- what must hold ---------------------------------------------------------------------------------------

    def others(self, server: Server) -> list[Server]:
        return [each for each in self.servers if each is not server]

    def wait_for_updates(self, servers: Sequence[Server], num_updates: int = 2) -> None:
        """Wait until each of these servers samples with weights that are newer by this many versions."""
        goal = num_updates + max((reading.version for server in servers if (reading := server.read())), default=0)
        self._wait(lambda: all((reading := server.read()) and reading.version >= goal for server in servers))

    def wait_for_tokens(self, servers: Sequence[Server], num_tokens: int = 32) -> None:
        """Wait until each of these servers has sampled more tokens."""
        before = {server.name: reading.tokens for server in servers if (reading := server.read())}
        self._wait(
            lambda: all(
                (reading := server.read()) and reading.tokens >= before.get(server.name, 0) + num_tokens
                for server in servers
            )
        )

    def wait_for_progress(self, num_tokens: int = 8) -> None:
        """Wait until the servers have sampled more tokens, or have none left to sample under the lag bound."""
        before = sum(reading.tokens for server in self.servers if (reading := server.read()))

        def has_progress() -> bool:
            readings = [server.read() for server in self.servers]
            if None in readings:
                return False
            known = [reading for reading in readings if reading]
            sampled = sum(reading.tokens for reading in known) - before
            return sampled >= num_tokens or not any(reading.in_flight for reading in known)

        self._wait(has_progress)

    def wait_for_newest_weights(self) -> None:
        """Wait until every server has received the version that the trainer published last."""
        self._wait(
            lambda: all(
                (reading := server.read()) and reading.staged >= num_lines(self.run.directory)
                for server in self.servers
            )
        )

    def wait_until_whole(self) -> None:
        """Wait until every server is a member: it gets new weights and requests."""
        self.wait_for_updates(self.servers)
        self.wait_for_tokens(self.servers, 1)

    def check_gap(self) -> None:
        """Check that the fleet as a whole did not stand still for longer than `weights.timeout_s`."""
        gap_s = self.watch.gap_s()
        assert gap_s <= WEIGHTS_TIMEOUT_S + MARGIN_S, f"no engine sampled a token for {gap_s:.1f} s"

    def check_weights(self, server: Server) -> None:
        """Check that a server samples as the trainer's checkpoint of its version does."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            sample = server.sample()
            versions = set(sample["weight_versions"])
            checkpoint = checkpoint_of(self.run.directory.checkpoints, max(versions))
            if len(versions) == 1 and checkpoint.exists():
                break
            assert time.monotonic() < deadline_s, f"server {server.name} stays at versions without a checkpoint"
        expected = sampled_from(self.run.directory, checkpoint)
        assert sample["token_ids"] == expected["token_ids"]
        np.testing.assert_allclose(sample["logprobs"], expected["logprobs"], atol=1e-4)

    def _wait(self, condition: Callable[[], object]) -> None:
        def check() -> bool:
            time.sleep(_POLL_S)  # every check asks servers that share two cores with the run
            return bool(condition())

        self.run.wait_until(check)


def sampled_from(run: RunDirectory, checkpoint: Path) -> dict[str, list[Any]]:
    """Sample the fixed request with the weights of a checkpoint, in this process."""
    recipe = load_recipe(run.config)
    weights = weights_of(load_model(checkpoint))
    engine = build_engine(recipe, load_config(checkpoint), weights, max_num_seqs=1)
    sampling = SamplingParams(NUM_TOKENS)
    engine.add([GenerationRequest(RolloutId(ROLLOUT), np.array(PROMPT, np.int32), sampling, seed=SEED)])
    while not (completions := engine.step()):
        pass
    generated = completions[0].generated
    return {"token_ids": generated.token_ids.tolist(), "logprobs": generated.logprobs.tolist()}


@contextlib.contextmanager
def fleet(path: Path, *settings: str, names: Sequence[str] = NAMES) -> Iterator[Fleet]:
    """Start a run with servers; check its books at the end."""
    directory = RunDirectory(path)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(training(RECIPE, f"run.directory={path}", *SETTINGS, *REMOTE, *settings))
        run = Run(directory, process)
        run.wait_until(directory.config.exists)
        loop = stack.enter_context(ProxyLoop())
        servers = start_servers(names, directory, loop)
        for server in servers:
            stack.callback(server.close)
        watch = TokenWatch(servers)
        stack.callback(watch.close)
        fleet = Fleet(run, servers, loop, watch)
        fleet.wait_until_whole()
        yield fleet
        fleet.proxies.plan.disarm()
        fleet.wait_until_whole()
        for server in servers:
            fleet.check_weights(server)
        run.end()
        check_lag(directory)
        assert check_policies(directory) > 0
    shutil.rmtree(path)  # hundreds of megabytes of checkpoints


def start_servers(names: Sequence[str], run: RunDirectory, loop: ProxyLoop) -> list[Server]:
    """Start several servers at a time."""
    servers: dict[str, Server] = {}
    threads = [
        threading.Thread(target=lambda name=name: servers.setdefault(name, Server(name, run, loop))) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [servers[name] for name in names]


def check_lag(run: RunDirectory) -> None:
    """Check the lag of every trained token against the bound of the schedule."""
    assert max(lag for batch in batches_of(run).values() for lag in batch.lag_histogram) <= MAX_LAG
