"""Datasets: the time to start, memory over epochs, and the sequence of problems after kills.

10,000 problems in JSON Lines come from two files that a mixture draws from, with an expression, a limit of tokens and
held-out prompts. Every process is a fresh one, as in a run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midflight.config import SHIPPED_RECIPES

NUM_PROBLEMS = 10_000
START_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 4 << 20  # the interpreter's own fluctuation; the rows have several times as many bytes
NUM_EPOCHS = 3
NUM_KILLS = 5
NUM_COMPARED = 2_000  # problems of the run that is killed

# The check of the recipe, as the command makes it before it starts a run.
_CHECK = """
import time
from pathlib import Path
from midflight.config import load_recipe
from midflight.launch.build import check_recipe
recipe = load_recipe(Path({recipe!r}))
start_s = time.perf_counter()
check_recipe(recipe)
print(time.perf_counter() - start_s)
"""
# The part of the rollout process that makes the environment, up to its first problem.
_BUILD = """
import time
from pathlib import Path
import midflight.run.workers
from midflight.config import load_recipe
from midflight.launch.environments import build_environment
recipe = load_recipe(Path({recipe!r}))
start_s = time.perf_counter()
build_environment(recipe).problem(0)
print(time.perf_counter() - start_s)
"""
# Memory that belongs to this process alone: pages of the mapped file count as the system's cache.
_MEMORY = """
import gc
from pathlib import Path
from midflight.config import load_recipe
from midflight.launch.environments import build_environment
def private_bytes():
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
task = build_environment(load_recipe(Path({recipe!r})))
for epoch in range({num_epochs}):
    for index in range(epoch * {num_problems}, (epoch + 1) * {num_problems}):
        task.problem(index)
    print(private_bytes())
"""
# A process that appends the problem of every index from the number of lines that a file has.
_SEQUENCE = """
import json
from pathlib import Path
from midflight.config import load_recipe
from midflight.launch.environments import build_environment
task = build_environment(load_recipe(Path({recipe!r})))
path = Path({log!r})
whole = path.read_bytes().rpartition(b"\\n")[0] if path.exists() else b""
path.write_bytes(whole + b"\\n" if whole else b"")
with path.open("a") as log:
    for index in range(whole.count(b"\\n") + bool(whole), {num_compared}):
        problem = task.problem(index)
        print(json.dumps([problem.source, problem.problem_id, problem.answer]), file=log, flush=True)
"""


def measure(say: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows and targets."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = write_recipe(Path(directory), NUM_PROBLEMS)
        environment = os.environ | {"HF_DATASETS_CACHE": str(Path(directory) / "cache"), "HF_HUB_OFFLINE": "1"}
        start = _start(recipe, environment, say)
        memory = _memory(recipe, environment, say)
        kills = _kills(recipe, environment, say)
    start_s = start["check_s"] + start["rollout_s"]
    growth = memory["growth_bytes"]
    targets = [
        {"name": "data: time to start, check and rollout process (s)", "value": start_s, "limit": START_LIMIT_S},
        {"name": "data: growth of private memory over 3 epochs (bytes)", "value": growth, "limit": MEMORY_LIMIT_BYTES},
        {"name": "data: problems that differ after kills", "value": kills["differing"], "limit": 0},
    ]
    return [start, memory, kills], [target | {"holds": target["value"] <= target["limit"]} for target in targets]


def write_recipe(directory: Path, num_problems: int) -> Path:
    """Write two files of problems, and a recipe that mixes them with filters; return the recipe's path."""
    chance = random.Random(0)
    for name, share in (("short", 2), ("long", 3)):
        with (directory / f"{name}.jsonl").open("w") as file:
            for number in range(num_problems * share // 5):
                digits = [chance.randint(1, 9) for _ in range(share * 2)]
                prompt = "".join(f"{label}{digit}" for label, digit in zip("abcdefghij", digits, strict=False)) + ":"
                row = {"prompt": prompt, "answer": str(sum(digits)), "level": number % 5, "note": "x" * 500}
                file.write(json.dumps(row) + "\n")
    sources = "".join(
        f'[[task.sources]]\nname = "{name}"\nweight = {weight}\n[task.sources.task]\ntype = "dataset"\nchat = false\n'
        f'path = "{name}.jsonl"\nwhere = "level < 4 and len(prompt) > 2"\ndrop_long_prompts = true\n'
        f'held_out_fraction = 0.1\ndifficulty = "level"\nrewards = ["exact"]\n'
        for name, weight in (("short", 1), ("long", 2))
    )
    recipe = directory / "recipe.toml"
    model = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"
    recipe.write_text(f'[model]\npath = "{model}"\n[task]\ntype = "mixture"\n{sources}')
    return recipe


def _start(recipe: Path, environment: dict[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """Time of the first check, of a check with a full cache, and of the environment in the rollout process.

    The imports of torch, which every run needs, are not included; the import of the library `datasets` is.
    """
    say(f"data: start with {NUM_PROBLEMS} problems")
    return {
        "what": "start",
        "problems": NUM_PROBLEMS,
        "check_s": float(_run(_CHECK.format(recipe=str(recipe)), environment)),
        "cached_check_s": float(_run(_CHECK.format(recipe=str(recipe)), environment)),
        "rollout_s": float(_run(_BUILD.format(recipe=str(recipe)), environment)),
    }


def _memory(recipe: Path, environment: dict[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """Private memory at the end of each of three epochs; the growth is counted from the end of the first epoch."""
    say(f"data: memory over {NUM_EPOCHS} epochs")
    script = _MEMORY.format(recipe=str(recipe), num_epochs=NUM_EPOCHS, num_problems=NUM_PROBLEMS)
    sizes = [int(line) for line in _run(script, environment).split()]
    return {"what": "memory", "epoch_bytes": sizes, "growth_bytes": max(sizes) - sizes[0]}


def _kills(recipe: Path, environment: dict[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """Problems of a process that is killed at random moments and continues, compared with an uninterrupted process."""
    say(f"data: the sequence of problems after {NUM_KILLS} kills")
    logs = [recipe.parent / name for name in ("uninterrupted.log", "killed.log")]
    scripts = [_SEQUENCE.format(recipe=str(recipe), log=str(log), num_compared=NUM_COMPARED) for log in logs]
    _run(scripts[0], environment)
    chance = random.Random(0)
    for _ in range(NUM_KILLS):
        before = _size(logs[1])
        with subprocess.Popen([sys.executable, "-c", scripts[1]], env=environment) as process:
            while process.poll() is None and _size(logs[1]) <= before:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.02))  # not a wait for anything: it dies at a random moment
            process.kill()
    num_before = logs[1].read_bytes().count(b"\n")
    _run(scripts[1], environment)
    problems = [log.read_text().splitlines() for log in logs]
    differing = sum(one != other for one, other in zip(*problems, strict=True))
    return {
        "what": "kills",
        "kills": NUM_KILLS,
        "problems": len(problems[0]),
        "before_last_kill": num_before,
        "differing": differing,
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _run(script: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    ).stdout
