"""Weights over a process group: they arrive exactly at every engine that can receive, whatever happens to others."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import IO, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midflight.errors import RecipeError, WeightUpdateError
from midflight.testing.weight_server import WeightServer
from midflight.types import TensorSpec
from midflight.weights import fleet, membership
from midflight.weights.buckets import all_bytes, place_in_ring, plan_buckets
from midflight.weights.engine_control import PROTOCOL
from midflight.weights.fleet import SenderSettings
from midflight.weights.group_sender import GroupSender
from midflight.weights.group_source import GroupSettings
from midflight.weights.process_group import local_address
from midflight.weights.process_group_transport import ProcessGroupTransport
from midflight.weights.specs import specs_of

WAIT_S = 30.0
TIMEOUT_S = 2.0  # longest wait for one engine


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "embedding": torch.randn(700, 700, generator=generator),
        "norm": torch.randn(8, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(version)),
        "strided": torch.randn(6, 4, generator=generator).bfloat16().T,
        "empty": torch.zeros(0, 3),
        "steps": torch.tensor([version, 2**40]),
        "parameter": torch.nn.Parameter(torch.randn(2000, 900, generator=generator)),
    }


SPECS = specs_of(weights(0))


@dataclass(frozen=True)
class Entry:
    url: str
    written_at: int = 0


@dataclass
class Run:
    """A sender, its registry, the versions that it published, and the lines that the user saw."""

    settings: SenderSettings
    engines: dict[str, Entry] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    noted: threading.Condition = field(default_factory=threading.Condition)
    sender: GroupSender = field(init=False)

    def __post_init__(self) -> None:
        registry: Callable[[], Mapping[str, Entry]] = lambda: dict(self.engines)  # noqa: E731
        self.sender = GroupSender(self.settings, registry, self.published.append, self._note, None)

    def send(self, version: int) -> None:
        self.sender.send(version, weights(version).items())

    def wait_for_line(self, *parts: str) -> None:
        def is_there() -> bool:
            return any(all(part in line for part in parts) for line in self.lines)

        with self.noted:
            assert self.noted.wait_for(is_there, WAIT_S), self.lines

    def _note(self, line: str) -> None:
        with self.noted:
            self.lines.append(line)
            self.noted.notify_all()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LOOK_S", 0.02)
    monkeypatch.setattr(membership, "BACKOFF_S", (0.05, 0.2))


def settings(bucket_bytes: int = 1 << 20, snapshot: bool = True, timeout_s: float = WAIT_S) -> SenderSettings:
    group = GroupSettings("tcp", None, timeout_s, torch.device("cpu"))
    return SenderSettings(group, "lineage", bucket_bytes, snapshot)


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start_run(how: SenderSettings | None = None, **engines: WeightServer) -> Run:
        run = Run(how or settings(), {name: Entry(server.url) for name, server in engines.items()})
        run.sender.announce(SPECS)
        runs.append(run)
        return run

    yield start_run
    for run in runs:
        run.sender.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., WeightServer]]:
    servers: list[WeightServer] = []

    def start_server(**options: Any) -> WeightServer:
        servers.append(WeightServer(options.pop("specs", SPECS), **options))
        return servers[-1]

    yield start_server
    for server in servers:
        server.close()


def assert_has(server: WeightServer, version: int, content: int | None = None) -> None:
    assert server.wait(version, WAIT_S)
    assert server.version == version
    for name, tensor in weights(version if content is None else content).items():
        assert server.weights[name].dtype == tensor.dtype
        assert torch.equal(server.weights[name], tensor), name


# --- the weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 1 << 20, 1 << 30])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_version_arrives_exactly(start: Any, serve: Any, num_engines: int, bucket_bytes: int) -> None:
    servers = {f"engine-{index}": serve() for index in range(num_engines)}
    run = start(settings(bucket_bytes), **servers)
    for version in range(4):
        run.send(version)
        for server in servers.values():
            assert_has(server, version)
    assert run.published == [0, 1, 2, 3]
    assert not run.lines


def test_streamed_weights_arrive_before_send_returns(start: Any, serve: Any) -> None:
    servers = [serve(), serve()]
    run = start(settings(4096, snapshot=False), a=servers[0], b=servers[1])
    run.send(0)  # the engines may still be unknown
    while any(server.version < 0 for server in servers):
        if run.sender.wants_weights():
            run.send(0)
    for version in range(1, 4):
        run.send(version)
        assert [server.version for server in servers] == [version] * 2
        assert_has(servers[0], version)
        assert not run.sender.wants_weights()


def test_a_joiner_makes_a_streaming_sender_want_weights(start: Any, serve: Any) -> None:
    run = start(settings(snapshot=False))
    run.send(3)
    run.sender.relabel(4)
    late = serve()
    run.engines["late"] = Entry(late.url)
    while not run.sender.wants_weights():
        pass
    run.sender.send(4, weights(3).items())
    assert_has(late, 4, content=3)
    assert late.content == 3


def test_send_copies_the_weights(start: Any, serve: Any) -> None:
    server = serve()
    run = start(engine=server)
    changing = weights(0)
    run.sender.send(0, changing.items())
    for tensor in changing.values():
        tensor.detach().zero_()
    assert_has(server, 0)


def test_relabel_sends_no_tensors(start: Any, serve: Any) -> None:
    server, late = serve(), serve()
    run = start(engine=server)
    run.send(0)
    assert_has(server, 0)
    sent = run.sender.sent_bytes
    assert sent == sum(bucket.num_bytes for bucket in plan_buckets(SPECS, 1 << 20))
    run.sender.relabel(1)
    assert_has(server, 1, content=0)
    assert server.content == 0
    assert run.sender.sent_bytes == sent
    run.engines["late"] = Entry(late.url)
    assert_has(late, 1, content=0)
    run.send(2)
    assert_has(server, 2)


def test_a_version_that_has_not_begun_is_replaced(start: Any, serve: Any) -> None:
    announced, proceed = threading.Event(), threading.Event()
    seen: list[int] = []

    def at(phase: str) -> None:
        if phase == "announced":
            announced.set()
            assert proceed.wait(WAIT_S)
        elif phase == "received":
            seen.append(int(server.weights["scalar"]))

    server = serve(at=at)
    run = start(engine=server)
    run.send(0)
    assert announced.wait(WAIT_S)
    places = set()
    for version in range(1, 5):
        run.send(version)
        places.add(run.sender._newest.snapshot.memory.data_ptr())
    assert len(places) == 1, "a second copy is enough while the first is in transit"
    proceed.set()
    assert_has(server, 4)
    assert seen == [0, 4]


def test_weights_that_differ_from_the_announcement_are_refused(start: Any, serve: Any) -> None:
    server = serve()
    run = start(engine=server)
    with pytest.raises(WeightUpdateError, match="lack 'norm'"):
        run.sender.send(0, [(name, tensor) for name, tensor in weights(0).items() if name != "norm"])
    run.send(1)
    assert_has(server, 1)
    with pytest.raises(WeightUpdateError, match="before they were announced"):
        Run(settings()).send(0)


# --- membership --------------------------------------------------------------------------------------------------


def test_the_group_is_reused_while_its_members_stay(start: Any, serve: Any) -> None:
    server, late = serve(), serve()
    run = start(engine=server)
    run.send(0)
    assert_has(server, 0)
    group = server.receiver
    run.send(1)
    assert_has(server, 1)
    assert server.receiver is group
    run.engines["late"] = Entry(late.url)
    assert_has(late, 1)
    run.send(2)
    assert_has(late, 2)
    assert_has(server, 2)
    assert server.receiver.world_size == late.receiver.world_size == 3


def test_an_engine_that_leaves_is_forgotten(start: Any, serve: Any) -> None:
    server, leaving = serve(), serve()
    run = start(engine=server, leaving=leaving)
    run.send(0)
    assert_has(leaving, 0)
    del run.engines["leaving"]
    leaving.close()
    while "leaving" in run.sender._fleet._membership._members:
        pass
    run.send(1)
    assert_has(server, 1)
    assert not run.lines


def test_a_restarted_engine_gets_the_newest_weights(start: Any, serve: Any) -> None:
    server = serve()
    run = start(engine=server)
    run.send(5)
    assert_has(server, 5)
    server.close()
    again = serve()
    run.engines["engine"] = Entry(again.url, written_at=1)
    assert_has(again, 5)


def test_an_engine_that_does_not_fit_is_left_out_once(start: Any, serve: Any) -> None:
    specs = [replace(spec, shape=(9,)) if spec.name == "norm" else spec for spec in SPECS]
    other, old, server = serve(specs=specs), serve(protocol=PROTOCOL - 1), serve()
    run = start(a_other=other, b_old=old, engine=server)
    for version in range(3):
        run.send(version)
        assert_has(server, version)
    run.wait_for_line("a_other", "'norm'")
    run.wait_for_line("b_old", f"version {PROTOCOL - 1} of the weight routes")
    assert len(run.lines) == 2
    assert other.version == old.version == -1
    again = serve()
    run.engines["a_other"] = Entry(again.url, written_at=1)
    assert_has(again, 2)


def test_two_entries_of_one_engine_count_once(start: Any, serve: Any) -> None:
    server, other = serve(), serve()
    run = start(a=server, b=other)
    run.engines["c"] = Entry(server.url)
    for version in range(3):
        run.send(version)
        assert_has(server, version)
        assert_has(other, version)
    assert not run.lines


def test_an_address_that_cannot_be_reached_is_named(start: Any, serve: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = serve()
    run = start(engine=server)
    run.engines["absent"] = Entry(url)
    for version in range(3):
        run.send(version)
        assert_has(server, version)
    run.wait_for_line("absent", url, "cannot be reached")
    assert len(run.lines) == 1


def test_nccl_is_refused_without_cuda(tmp_path: Any) -> None:
    transport = ProcessGroupTransport(tmp_path / "v", dict, "lineage", print, backend="nccl")
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match="nccl"):
            transport.sender()
    with closing(transport.versions()) as versions:
        assert versions.newest_version() is None


# --- errors ------------------------------------------------------------------------------------------------------


def test_an_engine_that_stops_early_passes_on_the_rest(start: Any, serve: Any) -> None:
    failing = True

    def at(phase: str) -> None:
        if failing and phase == "embedding":
            raise WeightUpdateError("not finite")

    first, second = serve(at=at), serve()
    run = start(settings(4096), a=first, b=second)
    run.send(0)
    assert_has(second, 0)
    run.wait_for_line("a is left out", "not finite")
    failing = False
    assert_has(first, 0)


def test_closing_the_sender_ends_a_receive_at_once(start: Any, serve: Any) -> None:
    """The timeout is longer than the test may take. The last tensor waits for the room of the first one."""
    arrived, ended = threading.Event(), threading.Event()

    def at(phase: str) -> None:
        if phase == "embedding":
            arrived.set()
            assert ended.wait(WAIT_S)

    server = serve(at=at)
    run = start(settings(4096, timeout_s=3600.0), engine=server)
    run.send(0)
    assert arrived.wait(WAIT_S)
    run.sender.close()
    ended.set()
    with server.changed:
        assert server.changed.wait_for(lambda: server.failures, WAIT_S)
    assert "version 0 did not arrive: " in server.failures[0]
    assert "the trainer at 127.0.0.1" in server.failures[0]


def test_loopback_peers_get_the_loopback_address() -> None:
    assert local_address("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(WeightUpdateError, match=r"nowhere\.invalid"):
        local_address("nowhere.invalid", 80)


# --- faults of real processes ------------------------------------------------------------------------------------


class Victim:
    """A server in a process of its own, which kills or stops itself at a phase."""

    def __init__(self, phase: str, deed: str, nth: int = 1) -> None:
        options = {"specs": [[spec.name, spec.shape, spec.dtype] for spec in SPECS]}
        command = [sys.executable, "-m", "midflight.testing.weight_server"]
        argument = json.dumps({**options, "phase": phase, "deed": deed, "nth": nth})
        self.process = subprocess.Popen([*command, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self.output.readline().strip()

    @property
    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


PHASES = ["invited", "joined", "announced", "embedding", "received"]
FIRST = [("kill", "embedding"), ("stop", "embedding")]
CASES = [
    pytest.param(deed, phase, marks=pytest.mark.slow if (deed, phase) in FIRST else pytest.mark.faults)
    for deed in ("kill", "stop")
    for phase in PHASES
]


@pytest.mark.parametrize(("deed", "phase"), CASES)
def test_the_others_go_on_without_a_lost_engine(start: Any, serve: Any, deed: str, phase: str) -> None:
    """The engine is in the middle of the chain. A stopped one comes back when it continues."""
    first, last = serve(), serve()
    with closing(Victim(phase, deed, nth=1 if phase in ("invited", "joined") else 2)) as victim:
        run = start(settings(1 << 20, timeout_s=TIMEOUT_S), a=first, c=last)
        run.engines["b"] = Entry(victim.url)
        for version in range(4):
            run.send(version)
            assert_has(first, version)
            assert_has(last, version)
        run.wait_for_line("engine b is left out")
        if deed == "kill":
            assert victim.process.wait(WAIT_S) == -signal.SIGKILL
            return
        victim.process.send_signal(signal.SIGCONT)
        run.wait_for_line("engine b has new weights again")
        while int(victim.output.readline()) < 3:
            pass


# --- buckets -----------------------------------------------------------------------------------------------------


def test_buckets_hold_each_tensor_once_within_their_size() -> None:
    sizes = [1, 3, 2, 1, 15, 500, 1, 16, 3, 1, 1]
    specs = [TensorSpec(str(index), (size,), "float32") for index, size in enumerate(sizes)]
    buckets = plan_buckets(specs, 256)
    names = [[placed.spec.name for placed in bucket.layout.tensors] for bucket in buckets]
    assert names == [["0", "1", "2", "3"], ["4"], ["5"], ["6", "7", "8", "9"], ["10"]]
    with pytest.raises(WeightUpdateError, match="announced twice"):
        plan_buckets([specs[0], specs[0]], 128)
    with pytest.raises(WeightUpdateError, match="complex64"):
        plan_buckets([TensorSpec("a", (1,), "complex64")], 128)


@given(st.lists(st.integers(0, 400), max_size=40), st.integers(1, 700))
def test_a_bucket_overwrites_no_bucket_in_the_ring(sizes: list[int], bucket_bytes: int) -> None:
    specs = [TensorSpec(str(index), (size,), "float32") for index, size in enumerate(sizes)]
    buckets = plan_buckets(specs, bucket_bytes)
    assert [placed.spec for bucket in buckets for placed in bucket.layout.tensors] == specs
    places, capacity = place_in_ring(buckets, bucket_bytes)
    largest = max((bucket.layout.slot_bytes for bucket in buckets), default=0)
    assert capacity <= min(all_bytes(buckets), largest + 3 * bucket_bytes)
    for index, (bucket, place) in enumerate(zip(buckets, places, strict=True)):
        assert place.num_left <= index
        assert place.offset + bucket.num_bytes <= capacity
        for earlier in range(place.num_left, index):
            assert (
                place.offset + bucket.num_bytes <= places[earlier].offset
                or places[earlier].offset + buckets[earlier].num_bytes <= place.offset
            )
