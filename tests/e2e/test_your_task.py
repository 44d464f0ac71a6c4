"""The page about a task of your own, done step by step: its files, its commands, its requests."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from midflight.config import load_recipe
from midflight.metrics.jsonl import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "your-task.md").read_text()
NUM_STEPS = 2
SMALL = [f"trainer.max_steps={NUM_STEPS}", "batch.batch_size=16", "schedule.num_in_flight=16", "eval.num_problems=8"]
# Language and content of every fenced block.
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STEP = f"step_{re.findall(r'max_steps = ([0-9]+)', PAGE)[0]}"  # of the checkpoint that the page serves


def files() -> dict[str, str]:
    """Return the files that a reader saves, by name."""
    return dict(re.findall(r"ave (?:this|it) as `([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))


def commands() -> list[list[str]]:
    """Return the commands of the page's plain blocks, as words; ends of a line with a backslash continue."""
    plain = [block for language, block in BLOCKS if not language]
    return [shlex.split(line) for block in plain for line in block.replace("\\\n", " ").splitlines()]


def run(words: list[str], directory: Path) -> str:
    python = [sys.executable, "-m", "midflight"] if words[0] == "midflight" else []
    executable = {"python": [sys.executable], "midflight": python}.get(words[0], [words[0]])
    done = subprocess.run([*executable, *words[1:]], cwd=directory, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def server(words: list[str], directory: Path) -> Iterator[str]:
    """Run a serving command until the end of the block; yield its URL."""
    command = [sys.executable, "-m", "midflight", *words[1:]]
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_page_names_its_files_and_commands() -> None:
    assert list(files()) == ["problems.py", "my_rewards.py", "sums.toml"]
    verbs = [words[1] for words in commands() if words[0] == "midflight"]
    assert verbs == ["new", "config", "train", "eval", "eval", "serve"]


def test_the_keys_for_an_instruction_tuned_model_exist(tmp_path: Path) -> None:
    _, block = [block for language, block in BLOCKS if language == "toml"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[batch]\nmax_tokens = 4096\n'
        + block.replace("[task]", '[task]\ntype = "dataset"\npath = "problems.jsonl"')
    )
    assert load_recipe(recipe).trainer.dtype == "bfloat16"


@pytest.mark.slow
def test_the_page_from_problems_to_a_served_checkpoint(tmp_path: Path) -> None:
    new, cd, *others = commands()
    run(new, tmp_path)
    project = tmp_path / cd[1]
    for name, text in files().items():
        (project / name).write_text(text)
    for words in others:
        served = [word.replace(STEP, f"step_{NUM_STEPS}") for word in words]
        if words[1] == "train":
            run([*words, *SMALL], project)
            lines = read_metrics(project / "runs" / "sums" / "metrics.jsonl")
            assert [line["version"] for line in lines] == [1, 2]
            assert all({"reward/accuracy", "reward/shows_steps"} <= line.keys() for line in lines)
        elif words[1] == "serve":
            served = [word.replace("8123", "0") for word in served]
            with server(served, project) as url:
                asked = [word.replace("http://127.0.0.1:8123", url) for word in others[-1]]
                text = json.loads(run(asked, project))["choices"][0]["text"]
                with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
                    model = served[2].rpartition("/")[2]
                    answer = client.completions.create(model=model, prompt="a3b9c4:", temperature=0)
                assert answer.choices[0].text == text
            break
        else:
            output = run(served, project)
            if words[:2] == ["head", "-n"]:
                assert json.loads(output).keys() == {"question", "sum", "digits"}
