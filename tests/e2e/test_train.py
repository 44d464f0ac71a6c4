"""Command `midflight train`: real processes, the shipped recipe, and the resulting run directory."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.schedules import PipelineConfig
from midflight.metrics.jsonl import read_metrics
from narrowing import instance
from refusals import Refused

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]
# One thread per process: with other work on the machine, two threads that wait for each other are slower than one.
ONE_THREAD = ("engine.threads=1", "trainer.threads=1")
SMALL = (*ONE_THREAD, "batch.batch_size=16", "schedule.num_in_flight=16", "eval.num_problems=32")
HAS_NAMESPACES = subprocess.run(["unshare", "--mount", "--net", "--map-root-user", "true"]).returncode == 0

needs_namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="needs user namespaces")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "midflight", *map(str, arguments)]


def midflight(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240)
    assert done.returncode == expect, done.stderr
    return done


def wait_for_steps(run: Path, process: subprocess.Popen[str], num_steps: int) -> None:
    """Wait until the metrics file has `num_steps` lines."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and len(metrics.read_bytes().splitlines()) >= num_steps:
            return
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    pytest.fail(f"the run ended early: {process.communicate()[1]}")


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_accounts(summary: dict[str, Any]) -> None:
    groups = summary["groups"]
    assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))
    assert groups["dropped"] == groups["failed"] == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a finished run of 12 steps, and the summary that it printed.

    If the kernel allows it, the run has no network device, not even loopback.
    """
    run = tmp_path_factory.mktemp("finished") / "run"
    training = command("train", RECIPE, f"run.directory={run}", "trainer.max_steps=12", *SMALL, "--json")
    isolated = ["unshare", "--net", "--map-root-user"] if HAS_NAMESPACES else []
    done = subprocess.run([*isolated, *training], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return run, json.loads(done.stdout)


@needs_namespaces
def test_the_demo_needs_no_network(finished: tuple[Path, dict[str, Any]]) -> None:
    _, summary = finished
    assert summary["steps"] == 12


def test_a_run_directory_is_complete(finished: tuple[Path, dict[str, Any]]) -> None:
    run, summary = finished
    assert summary == json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["samples"] == 12 * 16
    assert summary["aborted"] == 0
    assert summary["updates"] > 0
    assert summary["versions_per_rollout_max"] > 1
    assert summary["groups"]["trained"] == 12 * 2
    check_accounts(summary)
    for when in ("eval_before", "eval_after"):
        assert summary[when]["num_problems"] == 32
        assert 0 <= summary[when]["sampled_accuracy"] <= 1
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["version"] for line in lines] == list(range(1, 13))
    needed = {
        "reward/mean", "length/mean", "ess", "ratio/max", "kl/behavior", "lag/mean", "lag/max", "lag/p95", "entropy",
        "throughput/trained_tokens_per_s", "throughput/generated_tokens_per_s", "idle/trainer_fraction",
        "idle/generation_fraction", "samples", "wall_s", "in_flight",
    }  # fmt: skip
    assert needed <= set().union(*lines)
    assert all(line["length/mean"] * 16 == sum(line["length/by_rollout"]) for line in lines)
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {"decode", "update", "train", "wait"} <= {event["name"] for event in events}
    slots = [event["args"]["num_seqs"] for event in events if event["name"] == "decode"]
    num_in_flight = instance(load_recipe(run / "config.toml").schedule, PipelineConfig).num_in_flight
    assert max(slots) == num_in_flight
    assert sum(slots) >= summary["trained_tokens"]
    checkpoint = run / "checkpoints" / "step_12"
    assert AutoTokenizer.from_pretrained(checkpoint).encode("a1:")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    base = AutoModelForCausalLM.from_pretrained(RECIPE.parent / "models" / "chain_sums")
    assert any((a != b).any() for a, b in zip(model.parameters(), base.parameters(), strict=True))
    # The run directory is sufficient to evaluate its checkpoint again.
    evaluation = json.loads(midflight("eval", run / "config.toml", "--checkpoint", checkpoint, "--json").stdout)
    assert evaluation == {"model": str(checkpoint), **summary["eval_after"]}


def test_conventional_schedule(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ("schedule.type=conventional", "schedule.steps_per_rl_step=4", "trainer.max_steps=8")
    common = (f"run.directory={run}", *ONE_THREAD, "batch.batch_size=16", "eval.num_problems=0", "--json")
    done = midflight("train", RECIPE, *common, *overrides)
    summary = json.loads(done.stdout)
    assert summary["max_lag"] == 3
    assert summary["mean_lag"] == pytest.approx(1.5, abs=0.7)
    assert summary["versions_per_rollout_max"] == 1
    assert summary["eval_before"] is None
    check_accounts(summary)


def test_processes_share_the_work_of_the_reference(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ("preprocess.num_workers=2", "loss.type=reinforce", "loss.kl_coefficient=0.01", "eval.num_problems=0")
    done = midflight("train", RECIPE, f"run.directory={run}", "trainer.max_steps=6", *SMALL[:-1], *overrides, "--json")
    summary = json.loads(done.stdout)
    assert summary["steps"] == 6
    check_accounts(summary)
    lines = read_metrics(run / "metrics.jsonl")
    assert lines[0]["kl/reference"] == pytest.approx(
        0, abs=1e-4
    )  # policy and reference are the same model before the first update
    assert lines[-1]["kl/reference"] > 0
    assert all(line["time/preprocess_s"] > 0 for line in lines)
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    process_of = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    done_in = {(each["name"], process_of[each["pid"]]) for each in events if each["name"] in ("preprocess", "score")}
    assert done_in == {("preprocess", "preprocess"), ("score", "preprocess"), ("score", "preprocess-1")}


def test_ctrl_c_saves_a_checkpoint_and_resume_continues(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("train", RECIPE, f"run.directory={run}", "trainer.max_steps=100000", *SMALL)
    wait_for_steps(run, process, 3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert f"midflight train {run} --resume" in stderr.replace("\n", "")
    interrupted = json.loads((run / "summary.json").read_text())
    stopped_at = interrupted["steps"]
    assert (run / "checkpoints" / f"step_{stopped_at}").is_dir()
    assert interrupted["eval_before"]["num_problems"] == 32
    check_accounts(interrupted)

    done = midflight("train", run, "--resume", f"trainer.max_steps={stopped_at + 6}", "--json")
    summary = json.loads(done.stdout)
    assert summary["steps"] == stopped_at + 6
    assert summary["samples"] == summary["steps"] * 16
    assert summary["eval_before"] == interrupted["eval_before"]
    assert summary["generated_tokens"] > interrupted["generated_tokens"]
    check_accounts(summary)
    versions = [line["version"] for line in read_metrics(run / "metrics.jsonl")]
    assert versions == list(range(1, stopped_at + 7))


def test_a_diverged_run_ends_with_a_reason(tmp_path: Path) -> None:
    run = tmp_path / "run"
    blow_up = ("trainer.learning_rate=1e12", "trainer.max_grad_norm=1e12", "trainer.max_nonfinite_steps=2")
    done = midflight("train", RECIPE, f"run.directory={run}", *SMALL, *blow_up, expect=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("midflight: ")
    assert "not finite" in last
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"] is None
    groups = summary["groups"]
    assert groups["started"] == sum(count for name, count in groups.items() if name != "started")


FULL_DISK = """
set -e
mkdir -p "$1"
mount -t tmpfs -o size=12m none "$1"
code=0
$2 train $3 run.directory=$1/run trainer.max_steps=4 trainer.checkpoint_every=2 $4 --json || code=$?
echo "code $code, checkpoints: $(ls -A $1/run/checkpoints)"
mount -o remount,size=64m "$1"
$2 train $1/run --resume --json
"""


@needs_namespaces
def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """A real 12 MB disk has room for one checkpoint of 7.2 MB beside streams and logs, not for two."""
    arguments = [str(tmp_path / "disk"), " ".join(command()), str(RECIPE), " ".join(SMALL)]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", FULL_DISK, "bash", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "checkpoint step_4 could not be written" in done.stderr
    assert "No space left" in done.stderr
    assert "step_2 is kept" in done.stderr
    outcome, _, rest = done.stdout.partition("\n")
    assert outcome == "code 1, checkpoints: step_2"
    summary = json.loads(rest)
    assert summary["steps"] == 4
    assert summary["samples"] == 4 * 16
    check_accounts(summary)


SMALL_MEMORY = """
set -e
mount -t tmpfs -o size=2m none /dev/shm
mkdir -p "$1"
mount -t tmpfs -o size=$2m none "$1"
$3 train $4 run.directory=$1/run trainer.max_steps=2 $5 --json || echo "code $?"
ls -A /dev/shm "$1/run"
"""


def train_in_small_memory(tmp_path: Path, disk_mb: int) -> subprocess.CompletedProcess[str]:
    """Train with 2 MB of shared memory, as in a container; three copies of the weights need 7.2 MB."""
    settings = " ".join((*SMALL, "eval.num_problems=0"))
    arguments = [str(tmp_path / "disk"), str(disk_mb), " ".join(command()), str(RECIPE), settings]
    shell = ["unshare", "--mount", "--map-root-user", "bash", "-c", SMALL_MEMORY, "bash", *arguments]
    return subprocess.run(shell, capture_output=True, text=True, timeout=240)


@needs_namespaces
def test_small_shared_memory_falls_back_to_a_file(tmp_path: Path) -> None:
    done = train_in_small_memory(tmp_path, disk_mb=64)
    summary, end = json.JSONDecoder().raw_decode(done.stdout)
    assert (summary["steps"], summary["restarts"]) == (2, {}), done.stderr
    assert done.stderr.count("No space left on device; weights go through ") == 1
    left = done.stdout[end:].split()
    assert not [name for name in left if name.startswith(("midflight-", "weights"))]


@needs_namespaces
def test_a_run_that_fails_at_start_gives_a_reason(tmp_path: Path) -> None:
    done = train_in_small_memory(tmp_path, disk_mb=3)
    assert done.stdout.startswith("code 1\n")
    assert re.search(r"^midflight: .*cannot set aside 7.2 MB: No space left on device$", done.stderr.splitlines()[-1])
    assert "summary.json" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.toml",), "cannot read the recipe nothing.toml: No such file or directory"),
        ((RECIPE, "trainer.max_step=3"), "unknown key trainer.max_step; did you mean trainer.max_steps?"),
        ((RECIPE, "trainer.max_steps=few"), "trainer.max_steps: should be a valid integer"),
        ((RECIPE, "model.path=/nowhere"), "model.path: there is no directory /nowhere"),
        ((RECIPE, "batch.batch_size=30"), "is not a multiple of batch.group_size = 8; 24 or 32 would work"),
        (
            (RECIPE, "task.type=sudoku"),
            "task.type: there is no 'sudoku'; known are chain_sums, running_sums, dataset, reasoning_gym, mixture,"
            " package.module:name",
        ),
        ((RECIPE, "task.options.min_terms=1"), "min_terms = 1"),
        ((RECIPE, "task.options.colour=1"), "task.options: "),
        ((RECIPE, "task.type=midflight.testing.fakes:CountingEnvironment"), "it has no token for -"),
        (
            (RECIPE, "task.type=pathlib:Path"),
            "'pathlib:Path' does not implement Environment: it lacks problem, held_out_problems, grade",
        ),
        (
            (RECIPE, "task.type=obedient_environment:ObedientEnvironment", "task.options.error=no data"),
            "task.type: obedient_environment:ObedientEnvironment, the constructor: ValueError: no data",
        ),
        (("/tmp",), "is a directory; to continue the run in it, add --resume"),
        (("/tmp", "--resume"), "holds no run"),
        ((RECIPE, "schedule.queue_capacity=16"), "the batch could never fill up; 32 or more would work"),
        (
            (RECIPE, "schedule.type=april", "schedule.over_sampling=0.5"),
            "should be greater than or equal to 1, got 0.5",
        ),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
def test_invalid_input_is_a_one_line_error(
    tmp_path: Path, arguments: tuple[str | Path, ...], message: str, refused: Refused
) -> None:
    runs = [] if "--resume" in arguments else [f"run.directory={tmp_path / 'run'}"]
    assert message in refused("train", *arguments, *runs)
    assert not (tmp_path / "run").exists(), "an invalid recipe must not start a run"


def test_an_existing_run_directory_is_left_unchanged(finished: tuple[Path, dict[str, Any]], refused: Refused) -> None:
    run, _ = finished
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    assert "already holds a run" in refused("train", RECIPE, f"run.directory={run}")
    line = refused("train", run, "--resume", "batch.batch_size=64")
    assert "a resumed run keeps its batch" in line
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
