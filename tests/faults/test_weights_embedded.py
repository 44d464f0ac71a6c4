"""Faults of weights in shared memory, between the trainer and the engine in the rollout process.

The shared file tells where the trainer is: a slot has one stamp before its first byte and another after its last.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from faults.policies import check_policies
from faults.runs import Run, batches_of, num_lines, running
from midflight.actor.partials import PartialBuffer
from midflight.weights.slot_file import BEGIN, END, NEWEST, NUM_SLOTS, SlotFile

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

SETTINGS = (
    *("schedule.type=pipeline", "schedule.num_in_flight=16", "schedule.max_lag=6"),
    *("supervisor.backoff_s=0.02", "supervisor.max_restarts=20"),
)


class SharedWeights:
    """The shared file of a run, read by the test."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @contextlib.contextmanager
    def words(self) -> Iterator[memoryview]:
        lines = Path(f"/proc/{self._run.pid('trainer')}/maps").read_text().splitlines()
        path = next(Path(line.split()[-1]) for line in lines if line.endswith("/weights"))
        with closing(SlotFile(path, writable=False)) as file:
            yield file.words

    def wait_until_sent(self) -> None:
        """Wait until the trainer has sent a version, which the engine then begins to copy."""
        with self.words() as words:
            before = words[NEWEST]
            self._run.wait_until(lambda: words[NEWEST] != before)

    def stop_trainer_in_a_write(self) -> int:
        """Stop the trainer between the two stamps of a slot; return its pid."""
        pid = self._run.pid("trainer")
        with self.words() as words:
            while True:
                self._run.wait_until(lambda: is_written(words), poll_s=0)
                os.kill(pid, signal.SIGSTOP)
                self._run.wait_until(lambda: is_stopped(pid))
                if is_written(words):
                    return pid
                os.kill(pid, signal.SIGCONT)


def is_written(words: memoryview) -> bool:
    return any(words[BEGIN + slot] != words[END + slot] for slot in range(NUM_SLOTS))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def sampled_tokens(run: Run) -> int:
    """Return the number of tokens that the engine has sampled, as of the last save of the rollouts in flight."""
    with closing(PartialBuffer(run.directory.partials)) as partials:
        checkpoint = partials.load()
    in_flight = sum(len(rollout.generated) for rollout in checkpoint.rollouts) if checkpoint else 0
    return in_flight + (checkpoint.state.generated_tokens if checkpoint else 0)


def is_ahead(run: Run) -> bool:
    """Return True if a batch waits for the trainer, besides the one that it trains on."""
    return max(batches_of(run.directory), default=0) > num_lines(run.directory)


def kill_trainer(run: Run, weights: SharedWeights) -> None:
    os.kill(weights.stop_trainer_in_a_write(), signal.SIGKILL)
    print("fault: SIGKILL to the trainer in the middle of a write", flush=True)


def stop_trainer(run: Run, weights: SharedWeights) -> None:
    """The engine samples on with the weights it has, unless it is ahead of the trainer already, up to the lag bound."""
    pid = weights.stop_trainer_in_a_write()
    print("fault: SIGSTOP to the trainer in the middle of a write", flush=True)
    before = sampled_tokens(run)
    run.wait_until(lambda: sampled_tokens(run) > before or is_ahead(run))
    os.kill(pid, signal.SIGCONT)


def kill_rollout_during_a_write(run: Run, weights: SharedWeights) -> None:
    """The next rollout process starts with the newest complete slot."""
    pid = weights.stop_trainer_in_a_write()
    rollout = run.pid("rollout")
    os.kill(rollout, signal.SIGKILL)
    print("fault: SIGKILL to the rollout process during a write of the trainer", flush=True)
    os.kill(pid, signal.SIGCONT)
    run.wait_until(lambda: run.pid("rollout") != rollout)


def kill_rollout(run: Run, weights: SharedWeights) -> None:
    weights.wait_until_sent()
    os.kill(run.pid("rollout"), signal.SIGKILL)
    print("fault: SIGKILL to the rollout process while it copies weights", flush=True)


def stop_rollout(run: Run, weights: SharedWeights) -> None:
    """The trainer goes on until it has no batch left."""
    pid = run.pid("rollout")
    weights.wait_until_sent()
    os.kill(pid, signal.SIGSTOP)
    print("fault: SIGSTOP to the rollout process while it copies weights", flush=True)
    run.wait_until(lambda: is_stopped(pid))
    run.wait_until(lambda: num_lines(run.directory) > max(batches_of(run.directory), default=0))
    os.kill(pid, signal.SIGCONT)


FAULTS: list[Callable[[Run, SharedWeights], None]] = [
    *(kill_trainer, stop_trainer, kill_rollout, stop_rollout, kill_rollout_during_a_write),
    *(kill_trainer, stop_rollout, kill_rollout, stop_trainer, kill_rollout_during_a_write),
]


def test_shared_weights_survive_both_ends(tmp_path: Path) -> None:
    with running(tmp_path / "run", *SETTINGS) as run:
        weights = SharedWeights(run)
        for fault in FAULTS:
            fault(run, weights)
            run.wait_for_steps(2)
        run.end()
    batches = batches_of(run.directory)
    assert max(lag for batch in batches.values() for lag in batch.lag_histogram) <= 6
    assert check_policies(run.directory) > 0
