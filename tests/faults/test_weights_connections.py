"""Connections of the weights that are cut, cut short, held back or slow: one engine is hit, and the others go on.

Each series is one run with three engines. After every fault, all engines get new weights and requests again; at the end
every engine samples as the trainer's checkpoint does, and the books of the run are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.fleet import Fleet, Server, fleet
from faults.tcp_proxy import Connection, Effect, Place, in_answer
from faults.weight_links import BEYOND_PROOF, WeightLink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

MIB = 1 << 20
INVITATION, ANNOUNCEMENT, ADOPTION = b"POST /init_process_group", b"POST /request_weight_update", b"POST /adopt"


@dataclass(frozen=True)
class Cut:
    """A fault of one connection. `lasts`: until the other engines have gone on; then the connection is released."""

    name: str
    place: Callable[[WeightLink], Place]
    effect: Effect
    lasts: bool = False
    new_group: bool = False  # the place is met only while a group is formed


def delayed(connection: Connection) -> None:
    connection.delay(0.02)


def throttled(connection: Connection) -> None:
    connection.throttle(200_000)


def control(text: bytes, after_bytes: int = 0) -> Callable[[WeightLink], Place]:
    return lambda link: link.control(text, after_bytes=after_bytes)


def join(after_bytes: int) -> Callable[[WeightLink], Place]:
    return lambda link: link.join(after_bytes=after_bytes)


def incoming(after_bytes: int) -> Callable[[WeightLink], Place]:
    return lambda link: link.data("up", after_bytes)


def outgoing(after_bytes: int) -> Callable[[WeightLink], Place]:
    return lambda link: link.data("down", after_bytes)


ANNOUNCEMENTS = [
    Cut("the announcement is reset", control(ANNOUNCEMENT), Connection.reset),
    Cut("the announcement is cut off", control(ANNOUNCEMENT, 300), Connection.truncate),
    Cut("the announcement is held back", control(ANNOUNCEMENT, 20), Connection.hold, lasts=True),
    Cut("the announcement is lost", control(ANNOUNCEMENT, 20), Connection.swallow),
    Cut("the answer to the announcement is reset", control(ANNOUNCEMENT), in_answer(Connection.reset)),
    Cut("the answer to the announcement is cut off", control(ANNOUNCEMENT), in_answer(Connection.drop, 40)),
    Cut("the answer to the announcement is lost", control(ANNOUNCEMENT), in_answer(Connection.swallow)),
]
ADOPTIONS = [
    Cut("the wish to adopt is reset", control(ADOPTION), Connection.reset),
    Cut("the wish to adopt is held back", control(ADOPTION, 20), Connection.hold, lasts=True),
    Cut("the wish to adopt is lost", control(ADOPTION, 20), Connection.swallow),
    Cut("the answer to the wish is reset", control(ADOPTION), in_answer(Connection.reset)),
    Cut("the answer to the wish is cut off", control(ADOPTION), in_answer(Connection.drop, 30)),
    Cut("all control traffic is late", control(ADOPTION), delayed),
]
BUCKETS = [
    Cut("a bucket is reset at its first byte", incoming(0), Connection.reset),
    Cut("the first bucket is reset", incoming(MIB // 2), Connection.reset),
    Cut("the second bucket is reset", incoming(3 * MIB // 2), Connection.reset),
    Cut("the last bucket is reset", incoming(2_300_000), Connection.reset),
    Cut("the bytes of a bucket end early", incoming(MIB), Connection.truncate),
    Cut("the bytes of a bucket are lost", incoming(MIB), Connection.swallow),
    Cut("the bytes of a bucket are held back", incoming(MIB // 2), Connection.hold, lasts=True),
    Cut("the link is slow", incoming(100_000), throttled, lasts=True),
    Cut("the link is late", incoming(100_000), delayed),
    Cut("bytes to another member are reset", outgoing(10), Connection.reset),
    Cut("bytes to another member are lost", outgoing(10), Connection.swallow),
]
FORMING = [
    Cut("the invitation is reset", control(INVITATION), Connection.reset, new_group=True),
    Cut("the invitation is lost", control(INVITATION, 20), Connection.swallow, new_group=True),
    Cut("the invitation is held back", control(INVITATION, 20), Connection.hold, lasts=True, new_group=True),
    Cut("the answer to the invitation is cut off", control(INVITATION), in_answer(Connection.drop, 9), new_group=True),
    Cut("the way in is reset at its first byte", join(0), Connection.reset, new_group=True),
    Cut("the way in is reset during the proof", join(60), Connection.reset, new_group=True),
    Cut("the way in is reset after the proof", join(90), Connection.reset, new_group=True),
    Cut("the way in is silent", join(60), Connection.hold, lasts=True, new_group=True),
    Cut("the way in is late", join(0), delayed, new_group=True),
]
SERIES = {"control": ANNOUNCEMENTS + ADOPTIONS, "buckets": BUCKETS, "forming": FORMING}


@pytest.mark.faults
@pytest.mark.parametrize("name", SERIES)
def test_cut_connections_cost_one_engine(tmp_path: Path, name: str) -> None:
    with fleet(tmp_path / "run") as members:
        for index, cut in enumerate(SERIES[name]):
            endure(members, members.servers[index % len(members.servers)], cut)


def endure(members: Fleet, victim: Server, cut: Cut) -> None:
    """Inject one fault; check that the others go on while it lasts, and that the victim comes back."""
    others = members.others(victim)
    if cut.new_group:
        members.proxies.arm(victim.link.data(after_bytes=BEYOND_PROOF), Connection.reset)
    connection = members.strike(f"{cut.name}, engine {victim.name}", cut.place(victim.link), cut.effect)
    if cut.lasts:
        members.wait_for_updates(others)
        members.wait_for_tokens(others)
        members.proxies.call(connection.release)
    members.wait_until_whole()
    members.check_gap()


def test_an_unreachable_engine_costs_the_others_nothing(tmp_path: Path) -> None:
    """All new connections are refused, then the engine can be reached again."""
    with fleet(tmp_path / "run", names=("one", "two")) as members:
        victim = members.servers[0]
        victim.link.refuse(True)
        members.strike("new connections are refused", victim.link.control(), Connection.reset)
        members.wait_for_updates(members.others(victim))
        members.wait_for_tokens(members.others(victim))
        victim.link.refuse(False)
        members.wait_until_whole()
        members.check_gap()
