"""Processes that are killed or stopped at a phase of an update: nothing is lost, and the others go on.

The proxies of an engine tell the phase: the signal is sent by the thread that forwards the bytes, before they go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.fleet import Fleet, Server, fleet
from faults.tcp_proxy import Connection, Effect, Place, in_answer
from faults.weight_links import BEYOND_PROOF, WeightLink

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(500)]

PHASES: dict[str, Callable[[WeightLink], Place]] = {
    "while a group is formed": lambda link: link.join(after_bytes=60),
    "at the announcement": lambda link: link.control(b"POST /request_weight_update"),
    "during the broadcast": lambda link: link.data(after_bytes=1_200_000),
    "at the adoption": lambda link: link.control(b"POST /adopt"),
}


def strike(members: Fleet, victim: Server, phase: str, what: str, effect: Effect) -> None:
    if phase == "while a group is formed":
        members.proxies.arm(victim.link.data(after_bytes=BEYOND_PROOF), Connection.reset)
    members.strike(f"{what} {phase}", PHASES[phase](victim.link), effect)


def test_killed_and_stopped_engines_cost_the_others_nothing(tmp_path: Path) -> None:
    with fleet(tmp_path / "run") as members:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for index, phase in enumerate(PHASES):
                victim = members.servers[index % 3]
                others = members.others(victim)
                what = f"{number.name} to engine {victim.name}"
                strike(members, victim, phase, what, lambda _: victim.signal(number))  # noqa: B023
                members.wait_for_updates(others)
                members.wait_for_tokens(others)
                members.check_gap()
                if number == signal.SIGKILL:
                    victim.restart()
                victim.signal(signal.SIGCONT)
                members.wait_until_whole()


def test_a_killed_or_stopped_trainer_loses_nothing(tmp_path: Path) -> None:
    """While it is stopped, engines sample on up to the schedule's lag bound, and adopt nothing half received."""
    with fleet(tmp_path / "run") as members:
        for index, phase in enumerate(PHASES):
            victim = members.servers[index % 3]
            stop = members.send("trainer", signal.SIGSTOP)
            strike(members, victim, phase, "SIGSTOP to the trainer process", stop)
            members.wait_for_progress()
            members.resume("trainer")
            members.wait_until_whole()
            strike(members, victim, phase, "SIGKILL to the trainer process", members.send("trainer", signal.SIGKILL))
            members.wait_until_whole()


def test_a_killed_or_stopped_rollout_process_loses_nothing(tmp_path: Path) -> None:
    """While it is stopped, every engine gets the newest weights."""
    with fleet(tmp_path / "run") as members:
        for index, phase in enumerate(PHASES):
            victim = members.servers[index % 3]
            stop = members.send("rollout", signal.SIGSTOP)
            strike(members, victim, phase, "SIGSTOP to the rollout process", stop)
            members.wait_for_newest_weights()
            members.resume("rollout")
            members.wait_until_whole()
            strike(members, victim, phase, "SIGKILL to the rollout process", members.send("rollout", signal.SIGKILL))
            members.wait_until_whole()
        for role in ("trainer", "rollout"):
            adopted = in_answer(members.send(role, signal.SIGKILL))
            members.strike(
                f"SIGKILL to the {role} process after an adoption", PHASES["at the adoption"](victim.link), adopted
            )
            members.wait_until_whole()


def test_killed_and_stopped_ranks_lose_nothing(tmp_path: Path) -> None:
    """Two ranks gather one bucket after another while the engines receive: a rank is gone, or late, in between."""
    sharded = ("trainer.type=fsdp", "trainer.num_ranks=2")
    with fleet(tmp_path / "run", *sharded, names=("one", "two")) as members:
        for index, rank in enumerate(("trainer-1", "trainer")):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                victim = members.servers[index]
                pid = members.run.pid(rank)
                strike(members, victim, "during the broadcast", f"{number.name} to {rank}", members.send(rank, number))
                if number == signal.SIGSTOP:
                    members.wait_for_progress()
                    os.kill(pid, signal.SIGCONT)
                members.wait_until_whole()
