"""Proxies between the members of a real process group: every bucket passes through them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch

from faults.tcp_proxy import Connection, ProxyLoop
from faults.weight_links import WeightLink
from midflight.errors import WeightUpdateError
from midflight.weights.process_group import Announcement, Invitation, ProcessGroupReceiver, ProcessGroupSender

WEIGHTS = {f"layer.{index}": torch.arange(index, index + 50_000.0) for index in range(4)}
NUM_BYTES = sum(tensor.nbytes for tensor in WEIGHTS.values())


@pytest.fixture
def links() -> Iterator[list[WeightLink]]:
    with ProxyLoop() as loop:
        yield [WeightLink(loop, ("127.0.0.1", 9)) for _ in range(3)]


class Members:
    """Receivers in threads, each behind its link."""

    def __init__(self, links: list[WeightLink], timeout_s: float) -> None:
        self._links = links
        self._receivers: dict[int, ProcessGroupReceiver] = {}
        self.sender = ProcessGroupSender(
            "127.0.0.1", num_receivers=len(links), timeout_s=timeout_s, bucket_bytes=100_000
        )

    def invite(self, invitation: Invitation) -> None:
        body = json.dumps(asdict(invitation)).encode()
        body = self._links[invitation.rank - 1].rewrite_control("up", body)
        self._receivers[invitation.rank] = ProcessGroupReceiver(Invitation(**json.loads(body)))

    def announce(self, rank: int, announcement: Announcement) -> dict[str, torch.Tensor]:
        return self._receivers[rank].receive(announcement)


def test_weights_pass_through_every_link(links: list[WeightLink]) -> None:
    members = Members(links, timeout_s=30)
    passed: list[Connection] = []
    loop = links[0]._loop
    faults = [loop.arm(link.data(after_bytes=NUM_BYTES), passed.append) for link in links]
    members.sender.connect(members.invite)
    for version in (1, 2):
        for received in members.sender.send(version, WEIGHTS, members.announce):
            assert all(torch.equal(received[name], tensor) for name, tensor in WEIGHTS.items())
    assert all(fault.struck.is_set() for fault in faults)
    members.sender.close()


def test_a_cut_link_ends_the_broadcast(links: list[WeightLink]) -> None:
    members = Members(links, timeout_s=3)
    links[0]._loop.arm(links[1].data(after_bytes=NUM_BYTES // 2), Connection.reset)
    members.sender.connect(members.invite)
    with pytest.raises(WeightUpdateError, match="version 1"):
        members.sender.send(1, WEIGHTS, members.announce)
