"""Strangers at the ports of the weights while groups are formed: the run goes on, and the true engines get weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.fleet import Fleet, fleet
from faults.strangers import Strangers, listening_ports
from faults.tcp_proxy import Connection
from faults.weight_links import BEYOND_PROOF

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

NUM_GROUPS = 8  # at least
NUM_CONNECTIONS = 60  # of strangers, at least
MOST_OPEN_FILES = 400  # of a process, far fewer than there are strangers


def test_peers_without_the_token_change_nothing(tmp_path: Path) -> None:
    """A group is formed anew again and again: only then its ports are open."""
    with fleet(tmp_path / "run", names=("one", "two")) as members:

        def pids() -> Iterator[int]:
            yield members.run.pid("trainer")
            yield from (server.process.pid for server in members.servers)

        def messages() -> list[bytes]:
            return [message for server in members.servers for message in server.link.joined_with[-16:]]

        spared = {port for server in members.servers for port in listening_ports(server.process.pid)}
        with Strangers(pids, spared, messages) as strangers:
            num_groups = 0
            while num_groups < NUM_GROUPS or strangers.num_connections < NUM_CONNECTIONS:
                form_anew(members, num_groups)
                num_groups += 1
            assert not strangers.entered
            for pid in pids():
                assert len(os.listdir(f"/proc/{pid}/fd")) < MOST_OPEN_FILES


def form_anew(members: Fleet, index: int) -> None:
    """Cut a transfer of weights, and wait until all engines have new weights again."""
    victim = members.servers[index % len(members.servers)]
    members.strike(
        f"the weights of engine {victim.name} are reset", victim.link.data(after_bytes=BEYOND_PROOF), Connection.reset
    )
    members.wait_until_whole()
    members.check_gap()
