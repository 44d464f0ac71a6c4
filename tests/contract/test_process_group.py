"""Weights over a process group: they arrive exactly, or every rank gets an error."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future

import pytest
import torch

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.buckets import Packer, plan_buckets
from midflight.weights.process_group import (
    Announcement,
    Invitation,
    ProcessGroupReceiver,
    ProcessGroupSender,
    local_address,
)
from midflight.weights.specs import specs_of


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "embedding": torch.randn(50, 8, generator=generator),
        "norm": torch.randn(8, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(version)),
        "strided": torch.randn(6, 4, generator=generator).bfloat16().T,
        "empty": torch.zeros(0, 3),
        "steps": torch.tensor([version, 2**40]),
        "parameter": torch.nn.Parameter(torch.randn(3, 3, generator=generator)),
    }


class Receivers:
    """Receivers by rank; they handle invitations and announcements as a server does."""

    def __init__(self) -> None:
        self.by_rank: dict[int, ProcessGroupReceiver] = {}

    def invite(self, invitation: Invitation) -> None:
        self.by_rank[invitation.rank] = ProcessGroupReceiver(invitation)

    def announce(self, rank: int, announcement: Announcement) -> dict[str, torch.Tensor]:
        return self.by_rank[rank].receive(announcement)


@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("num_receivers", [1, 2])
def test_every_version_arrives_exactly(num_receivers: int, bucket_bytes: int) -> None:
    receivers = Receivers()
    sender = ProcessGroupSender("127.0.0.1", num_receivers=num_receivers, timeout_s=20, bucket_bytes=bucket_bytes)
    sender.connect(receivers.invite)
    for version in range(3):
        sent = weights(version)
        arrived = sender.send(version, sent, receivers.announce)
        assert len(arrived) == num_receivers
        for each in arrived:
            assert list(each) == list(sent)
            for name, tensor in sent.items():
                assert each[name].dtype == tensor.dtype
                assert torch.equal(each[name], tensor)
                assert not each[name].requires_grad
    sender.close()


def test_buckets_hold_each_tensor_once_within_their_size() -> None:
    sizes = [1, 3, 2, 1, 15, 500, 1, 16, 3, 1]
    specs = [TensorSpec(str(index), (size,), "float32") for index, size in enumerate(sizes)]
    buckets = plan_buckets(specs, 256)
    names = [[placed.spec.name for placed in bucket.tensors] for bucket in buckets]
    assert names == [["0", "1", "2", "3"], ["4"], ["5"], ["6"], ["7"], ["8", "9"]]
    with pytest.raises(WeightUpdateError, match="announced twice"):
        plan_buckets([specs[0], specs[0]], 128)
    with pytest.raises(WeightUpdateError, match="complex64"):
        plan_buckets([TensorSpec("a", (1,), "complex64")], 128)


def test_only_small_and_strided_tensors_are_copied() -> None:
    sent = {
        "large": torch.nn.Parameter(torch.randn(64, 8)),
        "small": torch.randn(3),
        "smaller": torch.tensor(2.0),
        "strided": torch.randn(8, 64).T,
    }
    buckets = plan_buckets(specs_of(sent), 1024)
    packer = Packer()
    for _ in range(2):
        large, small, strided = packer.pack(buckets, sent, torch.device("cpu"))
        assert large.data_ptr() == sent["large"].data_ptr()
        assert len(small) == 64 + 4, "padding after the last tensor is not sent"
        received = buckets[1].views(small) | buckets[2].views(strided)
        assert all(torch.equal(received[name], sent[name]) for name in ("small", "smaller", "strided"))


def test_a_receiver_reuses_its_memory() -> None:
    receivers = Receivers()
    sender = ProcessGroupSender("127.0.0.1", timeout_s=20)
    sender.connect(receivers.invite)
    places = set()
    for version in range(3):
        (arrived,) = sender.send(version, weights(version), receivers.announce)
        places.add(arrived["embedding"].data_ptr())
    assert len(places) == 1
    sender.close()


def test_a_refusal_ends_the_transfer_immediately() -> None:
    """The timeout is longer than the test may take, so the test cannot pass by waiting."""
    receivers = Receivers()
    sender = ProcessGroupSender("127.0.0.1", timeout_s=3600)

    def refuse(*_: object) -> None:
        raise WeightUpdateError("not today")

    with pytest.raises(WeightUpdateError, match="not today"):
        sender.connect(refuse)
    sender.connect(receivers.invite)
    with pytest.raises(WeightUpdateError, match="not today"):
        sender.send(1, weights(1), refuse)
    assert not sender.is_connected
    sender.connect(receivers.invite)
    (arrived,) = sender.send(2, weights(2), receivers.announce)
    assert torch.equal(arrived["scalar"], torch.tensor(2.0))


def test_sending_before_connecting_is_an_error() -> None:
    with pytest.raises(WeightUpdateError, match="before the group was set up"):
        ProcessGroupSender("127.0.0.1").send(1, weights(1), Receivers().announce)


def test_a_receiver_that_never_joins_times_out() -> None:
    sender = ProcessGroupSender("127.0.0.1", timeout_s=0.5)
    never = threading.Event()
    with pytest.raises(WeightUpdateError, match=r"not every receiver was ready within 0\.5 s"):
        sender.connect(lambda invitation: never.wait())
    never.set()


def test_the_sender_notices_a_lost_receiver() -> None:
    receivers = Receivers()
    sender = ProcessGroupSender("127.0.0.1", timeout_s=20, bucket_bytes=4 << 20)
    sender.connect(receivers.invite)
    big = {str(index): torch.zeros(1 << 20) for index in range(16)}

    def leave(rank: int, announcement: Announcement) -> None:
        receiver = receivers.by_rank.pop(rank)
        receiver._store.set(receiver._key, "ready")
        receiver.close()

    with pytest.raises(WeightUpdateError, match=r"version 1 was not sent: bucket \d+ of 16: "):
        sender.send(1, big, leave)
    assert not sender.is_connected


def test_the_receiver_notices_a_lost_sender() -> None:
    receivers = Receivers()
    sender = ProcessGroupSender("127.0.0.1", timeout_s=20)
    sender.connect(receivers.invite)
    announcement = Announcement(3, specs_of(weights(3)), 1 << 20)
    failure: Future[None] = Future()

    def receive() -> None:
        try:
            receivers.announce(1, announcement)
        except WeightUpdateError as error:
            failure.set_exception(error)

    thread = threading.Thread(target=receive)
    thread.start()
    sender.close()
    thread.join()
    with pytest.raises(WeightUpdateError, match="version 3 did not arrive: "):
        failure.result()


def test_the_sender_listens_on_the_given_address_only() -> None:
    """Every address in 127.0.0.0/8 is this machine."""
    receivers, invitations = Receivers(), []
    sender = ProcessGroupSender("127.0.0.1", timeout_s=20)

    def invite(invitation: Invitation) -> None:
        invitations.append(invitation)
        receivers.invite(invitation)

    sender.connect(invite)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", invitations[0].master_port))


def test_loopback_peers_get_the_loopback_address() -> None:
    assert local_address("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(WeightUpdateError, match=r"nowhere\.invalid"):
        local_address("nowhere.invalid", 80)
