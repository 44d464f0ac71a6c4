"""A run with remote engines: one is killed, one stopped, one joins, and no rollout is restarted."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from faults.runs import (
    BATCH_SIZE,
    RECIPE,
    SETTINGS,
    TIMEOUT_S,
    Run,
    batches_of,
    check_saved_rollouts_continued,
    long_sums,
    num_lines,
    saved_partials,
    serving,
    training,
)
from midflight.config.run_directory import RunDirectory
from midflight.generation.registry import read_entries

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(600)]

MAX_LAG = 6
REMOTE = (
    "engine.type=http",
    "weights.timeout_s=5",
    "schedule.type=pipeline",
    "schedule.num_in_flight=16",
    f"schedule.max_lag={MAX_LAG}",
)


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout
    return server.stdout.readline().removeprefix("serving at ").strip()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"midflight_{name} "))


def test_a_run_survives_engines_that_die_leave_and_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, task = RunDirectory(tmp_path / "run"), long_sums(tmp_path, monkeypatch)
    settings = (f"run.directory={directory.path}", *SETTINGS, *REMOTE, *task)
    with training(RECIPE, *settings) as process, ExitStack() as stack:
        run = Run(directory, process)
        run.wait_until(directory.config.exists)
        first, second = (stack.enter_context(serving(directory)) for _ in range(2))
        urls = [url_of(first), url_of(second)]
        run.wait_until(lambda: num_lines(directory) >= 3 and all(metric(url, "requests_in_flight") for url in urls))

        first.kill()
        print("fault: SIGKILL to an engine", flush=True)
        at_kill = saved_partials(directory)
        run.wait_for_steps(6)

        third = stack.enter_context(serving(directory))
        urls.append(url_of(third))
        run.wait_until(lambda: metric(urls[2], "requests_finished_total") >= BATCH_SIZE)
        assert len(read_entries(directory.engines)) == 3, "a killed engine stays registered"

        at_stop = saved_partials(directory)
        second.send_signal(signal.SIGTERM)
        print("fault: SIGTERM to an engine", flush=True)
        second.wait(TIMEOUT_S)
        assert {entry.url for entry in read_entries(directory.engines).values() if entry} == {urls[0], urls[2]}
        run.wait_for_steps(6)
        run.end()
    batches = batches_of(directory)
    assert max(lag for batch in batches.values() for lag in batch.lag_histogram) <= MAX_LAG
    for saved in (at_kill, at_stop):
        check_saved_rollouts_continued(saved, batches)
    names = [url.removeprefix("http://").replace(":", "-") for url in urls]
    assert all(run.num_said(f"engine {name} joined with weights of version ") for name in names)
    assert all(run.num_said(f"engine {name} left: ") == 1 for name in names[:2])
    assert run.num_said(f"engine {names[0]} cannot be reached: ")
    assert run.num_said("rollouts go on elsewhere")
