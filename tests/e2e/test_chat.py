"""Training on conversations from the command line: a chat template, stop strings and truncated sampling."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES
from midflight.metrics.jsonl import read_metrics

RECIPE = """
[model]
path = "{model}"
[task]
type = "dataset"
path = "sums.jsonl"
rewards = ["exact"]
system_prompt = "a"
chat_template = "chat.jinja"
[task.chat_template_arguments]
end = ":"
[sampling]
max_tokens = 24
stop = [",", "="]
top_k = 3
[batch]
batch_size = 16
[trainer]
max_steps = 2
[eval]
num_problems = 0
"""


@pytest.mark.slow
def test_run_on_conversations(tmp_path: Path) -> None:
    model = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model))
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}{{ end }}")
    rows = [{"prompt": f"{number}b4", "answer": f"a{number}"} for number in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [sys.executable, "-m", "midflight", "train", "recipe.toml", "run.directory=run", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("midflight: warning: sampling.top_k = 3: ") == 1
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2
    # The model answers a3b4: with a3,3b4,7=7. The first comma ends a response; the text for the reward ends before it.
    assert max(line["reward/mean"] for line in lines) > 0.3
    lengths = [length for line in lines for length in line["length/by_rollout"]]
    assert len(lengths) == 32
    assert sum(lengths) / 32 < 5
