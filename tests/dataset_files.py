"""Small datasets for tests, and tasks made from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from midflight.config.tasks import DatasetSource
from midflight.envs.datasets.task import DatasetTask
from midflight.envs.rewards.exact import Exact
from midflight.envs.rewards.signatures import reward_function
from midflight.envs.rewards.terms import Rewards, Term
from midflight.types import Problem

EXACT = Rewards([Term("exact", reward_function("exact", Exact, {}))])


def sums(num_rows: int) -> list[dict[str, Any]]:
    """Rows with the columns question, answer and level; levels cycle through 1, 2 and 3."""
    return [{"question": f"{n} + {n}?", "answer": str(2 * n), "level": n % 3 + 1} for n in range(num_rows)]


def write_lines(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """Write a JSON Lines file; a string is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def dataset_task(
    path: Path, rows: Iterable[dict[str, Any] | str] | None = None, *, seed: int = 0, **keys: Any
) -> DatasetTask:
    """Return the task of a file; `rows` are written to it first. Prompts are the column question unless `keys` say."""
    if rows is not None:
        write_lines(path, rows)
    return DatasetTask(DatasetSource(**{"path": path, "prompt": "question"} | keys), rewards=EXACT, seed=seed)


def texts(problems: Sequence[Problem]) -> list[str]:
    return [problem.text for problem in problems]


def epoch(task: DatasetTask, num_rows: int, index: int = 0) -> list[str]:
    """Prompts of an epoch of `num_rows` training rows."""
    return texts([task.problem(index * num_rows + position) for position in range(num_rows)])
