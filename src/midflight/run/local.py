"""A run on one machine: evaluate, start the workers, watch them, stop them, evaluate, summarize.

This process imports no torch and stays small. Evaluations before and after training have a process of their own.

waits for      a message or the end of a worker; Ctrl-C
unblocked by   any of them; the view is refreshed every REFRESH_S
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import MidflightError
from midflight.launch.users_modules import use_directory_of
from midflight.metrics.evaluations import append_evaluation
from midflight.metrics.jsonl import MetricsTail, json_text
from midflight.report.length_advice import LengthAdvice
from midflight.report.progress import LiveView, failure_warning
from midflight.run.directory import write_atomically
from midflight.run.evaluated import best_checkpoint_of, missed_version
from midflight.run.resuming import prepare_to_resume
from midflight.run.roles import EVALUATION, evaluation_bodies, worker_bodies
from midflight.run.summary import summarize
from midflight.run.supervisor import Supervisor, warm_up
from midflight.tracing.chrome import write_chrome_trace
from midflight.trainer.checkpoints import checkpoint_of, load_state, newest_checkpoint

REFRESH_S = 0.25


class InterruptedRunError(MidflightError):
    """The user stopped the run, which can be resumed."""

    exit_code = 130


def run_locally(recipe: Recipe, run: RunDirectory, console: Any) -> dict[str, Any]:
    """Train to the end of the recipe; return the summary, which is also written to the run directory.

    Raises: WorkerError; the error that a worker reported; InterruptedRunError after Ctrl-C, with a checkpoint written.
    """
    ended_early: MidflightError | None = None
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    use_directory_of(recipe)
    with run.locked():
        run.wait_for_workers(say)
        prepare_to_resume(run, recipe, say)
        warm_up()
        before = _previous_summary(run)
        num_restarts: Counter[str] = Counter(before.get("restarts"))
        evaluations = _Evaluations(recipe, run, num_restarts, say, console)
        eval_before = before.get("eval_before") or evaluations.evaluate(0, "before")
        eval_after = None
        try:
            _train(recipe, run, num_restarts, say, console)
            eval_after = evaluations.evaluate_trained()
        except MidflightError as error:
            ended_early = error
        spans = [run.spans(role) for role in worker_bodies(recipe)]
        write_chrome_trace([path for path in spans if path.exists()], run.trace)
        summary = summarize(run, recipe, eval_before, eval_after) | {"restarts": num_restarts}
        write_atomically(run.summary, json_text(summary) + "\n")
    if ended_early:
        raise ended_early
    if warning := failure_warning(summary):
        console.print(warning, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return summary


def _previous_summary(run: RunDirectory) -> dict[str, Any]:
    """Return the summary that the interrupted run left; empty if there is none."""
    if not run.summary.exists():
        return {}
    summary: dict[str, Any] = json.loads(run.summary.read_text())
    return summary


@dataclass(frozen=True, slots=True)
class _Evaluations:
    """Evaluations before and after training. Each has a process of its own, whose memory is free when it ends."""

    recipe: Recipe
    run: RunDirectory
    num_restarts: Counter[str]
    say: Callable[[str], None]
    console: Any

    def evaluate_trained(self) -> dict[str, Any] | None:
        """Evaluate the newest checkpoint, and before it the one whose evaluation the end of training interrupted."""
        newest = newest_checkpoint(self.run.checkpoints)
        if newest is None:
            return None
        version = load_state(newest).version
        if missed := missed_version(self.recipe, self.run, version):
            self.evaluate(missed, "after")
        evaluation = self.evaluate(version, "after")
        if best := best_checkpoint_of(self.recipe, self.run):
            best.update_link()
        return evaluation

    def evaluate(self, version: int, when: str) -> dict[str, Any] | None:
        """Evaluate the model before training (version 0) or a checkpoint; return None without problems.

        Raises: as `run_locally`.
        """
        config, run = self.recipe.eval, self.run
        if not config.has_problems:
            return None
        model = checkpoint_of(run.checkpoints, version) if version else self.recipe.model.path
        sets = [f"{config.num_problems} held-out problems"] if config.num_problems else []
        names = ", ".join([*sets, *(item.name for item in config.sets)])
        bodies = evaluation_bodies(model)
        with self.console.status(f"evaluating {when} training on {names}"), _weights_directory(run) as directory:
            supervisor = Supervisor(self.recipe, run, directory, bodies, self.num_restarts, self.say, until=EVALUATION)
            _supervise(supervisor, run)
        evaluation: dict[str, Any] = supervisor.results[EVALUATION]
        append_evaluation(run.evaluations, version, {"when": when, **evaluation})
        return evaluation


def _train(
    recipe: Recipe, run: RunDirectory, num_restarts: Counter[str], say: Callable[[str], None], console: Any
) -> None:
    with _weights_directory(run) as weights_directory, LiveView(recipe.trainer.max_steps, console) as view:
        tail, advice = MetricsTail(run.metrics), LengthAdvice(recipe.sampling.max_tokens, say)
        supervisor = Supervisor(recipe, run, weights_directory, worker_bodies(recipe), num_restarts, say)

        def refresh() -> None:
            while lines := tail.read():
                view.update(lines)
                advice.update(lines)
                supervisor.newest_version = max([supervisor.newest_version, *(line["version"] for line in lines)])

        _supervise(supervisor, run, refresh)


def _supervise(supervisor: Supervisor, run: RunDirectory, refresh: Callable[[], None] = lambda: None) -> None:
    """Start the processes and watch them to the end; stop them in any case.

    Raises: as `run_locally`.
    """
    try:
        with _interrupts() as interrupts:
            supervisor.start()
            while not supervisor.finished():
                supervisor.watch(REFRESH_S)
                refresh()
                if interrupts:
                    raise InterruptedRunError(f"stopped; to resume: midflight train {run.path} --resume")
    finally:
        supervisor.stop()
        refresh()
        supervisor.check()


@contextlib.contextmanager
def _weights_directory(run: RunDirectory) -> Iterator[Path]:
    """Create a temporary directory for the shared weights, in memory if the system has /dev/shm."""
    shared_memory = Path("/dev/shm")
    parent = shared_memory if shared_memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="midflight-", dir=parent) as directory:
        try:
            yield Path(directory)
        finally:
            run.spare_weights.unlink(missing_ok=True)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM (sent by clusters) in a list instead of raising.

    An exception could arrive while a process is being started, and leave that process without a supervisor.
    """
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # a script's background job ignores Ctrl-C
            signal.signal(number, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
