"""Worker processes that wait, and their supervisor.

Run as `workers.py DIRECTORY BODY`, this file is a supervisor that a test kills.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import midflight.run.worker_process as worker_process
from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.launch.build import join_training
from midflight.run.directory import create_run
from midflight.run.supervisor import Supervisor
from midflight.run.worker_process import WorkerBody, WorkerContext, start_together

RECIPE = SHIPPED_RECIPES["cpu_demo"]
SETTINGS = ("supervisor.backoff_s=0", "trainer.type=fsdp", "trainer.num_ranks=2")
TIMEOUT_S = 60.0


def wait_for_stop(context: WorkerContext) -> None:
    _write_pid(context.run)
    start_together(context)
    while not context.should_stop():
        time.sleep(0.01)


def wait_for_peer(context: WorkerContext) -> None:
    """Wait as a trainer rank whose peer never joins the rendezvous."""
    _write_pid(context.run)
    with join_training(context.recipe, 0, context.weights_directory / "ranks"):
        raise AssertionError("the rendezvous ended without a peer")


def wait_forever(context: WorkerContext) -> None:
    """Block in a call that never returns, after the start of the run."""
    worker_process._ORPHAN_GRACE_S = 0.2
    start_together(context)
    _write_pid(context.run)
    while True:
        time.sleep(TIMEOUT_S)


def _write_pid(run: RunDirectory) -> None:
    (run.path / f"pid-{os.getpid()}").touch()


def pids_of(run: Path) -> set[int]:
    return {int(path.name.removeprefix("pid-")) for path in run.glob("pid-*")}


@dataclass
class Supervised:
    run: Path
    weights: Path
    supervisor: Supervisor
    said: list[str] = field(default_factory=list)

    def pids(self) -> set[int]:
        """Return every process that ever ran."""
        return pids_of(self.run)

    def watch_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.said
            self.supervisor.watch(0.02)


@contextmanager
def supervised(directory: Path, bodies: Mapping[str, WorkerBody]) -> Iterator[Supervised]:
    recipe = load_recipe(RECIPE, [*SETTINGS, f"run.directory={directory / 'run'}"])
    run, weights = create_run(recipe), directory / "weights"
    weights.mkdir()
    said: list[str] = []
    supervisor = Supervisor(recipe, run, weights, bodies, Counter(), said.append)
    supervisor.start()
    try:
        yield Supervised(run.path, weights, supervisor, said)
    finally:
        supervisor.stop()


def main(directory: str, body: str) -> None:
    with supervised(Path(directory), {"trainer": globals()[body]}) as run:
        run.watch_until(lambda: False)


if __name__ == "__main__":
    main(*sys.argv[1:])
