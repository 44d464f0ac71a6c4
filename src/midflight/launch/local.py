"""The supervisor of a run on one machine: evaluate, start the workers, watch, stop them, evaluate, sum up.

waits for      a message or the end of a worker; Ctrl-C
unblocked by   either; the view is refreshed every REFRESH_S
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from midflight.config import Recipe
from midflight.errors import MidflightError, WorkerError
from midflight.launch.evaluation import evaluate_model
from midflight.launch.progress import LiveView
from midflight.launch.run_directory import RunDirectory, write_whole
from midflight.launch.summary import summarize
from midflight.launch.workers import WorkerContext, run_worker, worker_bodies
from midflight.metrics.jsonl import MetricsTail
from midflight.tracing.chrome import write_chrome_trace
from midflight.trainer.checkpoints import newest_checkpoint

REFRESH_S = 0.25
_STOP_TIMEOUT_S = 60.0


class InterruptedRunError(MidflightError):
    """The user stopped the run; it can go on later."""

    exit_code = 130


def run_locally(recipe: Recipe, run: RunDirectory, console: Any) -> dict[str, Any]:
    """Train to the end of the recipe; the summary, which is also written to the run directory.

    Raises: WorkerError or what a worker reported; InterruptedRunError after Ctrl-C, with a checkpoint written.
    """
    ended_early: MidflightError | None = None
    with run.locked():
        run.wait_for_workers(functools.partial(console.print, soft_wrap=True))
        eval_before = _previous_evaluation(run) or _evaluate(recipe, recipe.model.path, "before", console)
        try:
            _train(recipe, run, console)
        except MidflightError as error:
            ended_early = error
        spans = [run.spans(role) for role in worker_bodies(recipe)]
        write_chrome_trace([each for each in spans if each.exists()], run.trace)
        eval_after = None if ended_early else _evaluate(recipe, newest_checkpoint(run.checkpoints), "after", console)
        summary = summarize(run, recipe, eval_before, eval_after)
        write_whole(run.summary, json.dumps(summary, indent=2) + "\n")
    if ended_early:
        raise ended_early
    return summary


def _previous_evaluation(run: RunDirectory) -> dict[str, Any] | None:
    """The evaluation before training, if this run was interrupted after it."""
    if not run.summary.exists():
        return None
    evaluation: dict[str, Any] | None = json.loads(run.summary.read_text())["eval_before"]
    return evaluation


def _evaluate(recipe: Recipe, model: Path | None, when: str, console: Any) -> dict[str, Any] | None:
    if not recipe.eval.num_problems or model is None:
        return None
    with console.status(f"evaluating {when} training on {recipe.eval.num_problems} held-out problems"):
        return asdict(evaluate_model(recipe, model))


def _train(recipe: Recipe, run: RunDirectory, console: Any) -> None:
    with _weights_directory() as weights_directory, LiveView(recipe.trainer.max_steps, console) as view:
        tail = MetricsTail(run.metrics)
        workers = _Workers(recipe, run, weights_directory, functools.partial(console.print, soft_wrap=True))
        try:
            with _interrupt_on_sigterm():
                workers.start()
                while not workers.finished():
                    workers.watch(REFRESH_S)
                    view.update(tail.read())
        except KeyboardInterrupt:
            raise InterruptedRunError(f"stopped; go on with: midflight train {run.path} --resume") from None
        finally:
            workers.stop()
            view.update(tail.read())
            workers.check()


class _Workers:
    """The processes of a run. The trainer decides when it is over; whatever happens, all of them are stopped."""

    def __init__(
        self, recipe: Recipe, run: RunDirectory, weights_directory: Path, report: Callable[[str], None]
    ) -> None:
        """`report` gets what workers have to say to the user."""
        spawn = multiprocessing.get_context("spawn")
        self._run, self._report = run, report
        self._processes: dict[str, BaseProcess] = {}
        self._connections: dict[str, Connection] = {}
        for role, body in worker_bodies(recipe).items():
            ours, theirs = spawn.Pipe()
            context = WorkerContext(recipe, run, weights_directory, theirs, os.getpid())
            self._processes[role] = spawn.Process(target=run_worker, args=(body, role, context), name=role)
            self._connections[role] = ours
        self._ready: set[str] = set()
        self._done: set[str] = set()

    def start(self) -> None:
        for process in self._processes.values():
            process.start()

    def finished(self) -> bool:
        return "trainer" in self._done

    def watch(self, timeout_s: float) -> None:
        """Handle what the workers say until the timeout.

        Raises: what a worker reported; WorkerError if one died without a word.
        """
        connections = {connection: role for role, connection in self._connections.items()}
        sentinels = {process.sentinel: role for role, process in self._processes.items()}
        ended = wait([*connections, *sentinels], timeout_s)
        for item in ended:
            if isinstance(item, Connection):
                self._hear(connections[item])
        for item in ended:
            if isinstance(item, int) and sentinels[item] not in self._done:
                self._hear(sentinels[item])
                self._report_death(sentinels[item])
        if self._done and not self.finished():
            role = min(self._done)
            raise WorkerError(f"the {role} process was stopped; go on with: midflight train {self._run.path} --resume")

    def stop(self) -> None:
        """Ask all of them to stop and to write what they have to; kill what does not listen."""
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
        for process in self._processes.values():
            if process.pid is not None:
                process.join(_STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()

    def check(self) -> None:
        """Raises: what a worker reported and nobody has heard yet, such as a disk that was full when it stopped."""
        for role in self._processes:
            self._hear(role)

    def _hear(self, role: str) -> None:
        connection = self._connections[role]
        while connection.poll():
            try:
                match connection.recv():
                    case ("ready",):
                        self._ready.add(role)
                        if self._ready == self._processes.keys():
                            for other in self._connections.values():
                                other.send(("go",))
                    case ("note", text):
                        self._report(text)
                    case ("done",):
                        self._done.add(role)
                    case ("failed", exit_code, text):
                        error = WorkerError(text)
                        error.exit_code = exit_code
                        raise error
            except (EOFError, ConnectionResetError):  # it is gone
                return

    def _report_death(self, role: str) -> None:
        if role in self._done:
            return
        self._processes[role].join()  # its pipe closes a moment before its exit code is known
        exit_code = self._processes[role].exitcode
        how = f"was killed by signal {-exit_code}" if exit_code and exit_code < 0 else f"ended with code {exit_code}"
        raise WorkerError(
            f"the {role} process {how}; its log is {self._run.log(role)};"
            f" go on from the last checkpoint with: midflight train {self._run.path} --resume"
        )


@contextlib.contextmanager
def _weights_directory() -> Iterator[Path]:
    """A place for the shared weights: in memory where the system has such a directory."""
    shared_memory = Path("/dev/shm")
    parent = shared_memory if shared_memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="midflight-", dir=parent) as directory:
        yield Path(directory)


@contextlib.contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """A cluster's SIGTERM means what Ctrl-C means."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
