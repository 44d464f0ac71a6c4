"""Proxies between the members of a real process group: all that it sends passes through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from faults.tcp_proxy import Connection, ProxyLoop
from faults.weight_links import WeightLink
from midflight.testing.weight_server import WeightServer
from midflight.weights.process_group_transport import ProcessGroupTransport
from midflight.weights.specs import specs_of

WEIGHTS = {f"layer.{index}": torch.arange(index, index + 200_000.0) for index in range(4)}
NUM_BYTES = sum(tensor.nbytes for tensor in WEIGHTS.values())
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Entry:
    url: str
    written_at: int = 0


@dataclass
class Group:
    """A sender and three servers, each behind its link."""

    loop: ProxyLoop
    servers: list[WeightServer]
    links: list[WeightLink]
    transport: ProcessGroupTransport

    def check(self, version: int) -> None:
        for server in self.servers:
            assert server.wait(version, TIMEOUT_S)
            assert all(torch.equal(server.weights[name], tensor + version) for name, tensor in WEIGHTS.items())


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    specs = specs_of(WEIGHTS)
    with ProxyLoop() as loop:
        servers = [WeightServer(specs) for _ in range(3)]
        links = [WeightLink(loop, address_of(server)) for server in servers]
        entries = {f"engine-{index}": Entry(link.url) for index, link in enumerate(links)}
        transport = ProcessGroupTransport(
            tmp_path / "board", lambda: entries, "lineage", print, bucket_mib=1, timeout_s=2.0
        )
        yield Group(loop, servers, links, transport)
        for server in servers:
            server.close()


def address_of(server: WeightServer) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def test_weights_pass_through_every_link(group: Group) -> None:
    passed: list[Connection] = []
    faults = [group.loop.arm(link.data(after_bytes=2 * NUM_BYTES), passed.append) for link in group.links]
    with closing(group.transport.sender()) as sender:
        sender.announce(specs_of(WEIGHTS))
        for version in (1, 2):
            sender.send(version, [(name, tensor + version) for name, tensor in WEIGHTS.items()])
            group.check(version)
    assert all(fault.struck.is_set() for fault in faults)


def test_a_cut_link_is_replaced(group: Group) -> None:
    fault = group.loop.arm(group.links[1].data(after_bytes=NUM_BYTES // 2), Connection.reset)
    with closing(group.transport.sender()) as sender:
        sender.announce(specs_of(WEIGHTS))
        sender.send(1, [(name, tensor + 1) for name, tensor in WEIGHTS.items()])
        group.check(1)
    assert fault.struck.is_set()
