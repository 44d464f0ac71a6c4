"""Problems of a dataset: order, epochs, columns, held-out rows, and processes that load nothing."""

from __future__ import annotations

import datetime
import pickle
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dataset_files import EXACT, dataset_task, epoch, sums, texts, write_lines
from midflight.config.tasks import DatasetSource
from midflight.envs.datasets.task import DatasetTask
from midflight.types import Grade, Message


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def test_row_becomes_a_problem_with_its_columns(tmp_path: Path) -> None:
    row = {"id": 7, "q": "1 + 1?", "a": "so #### 2", "level": 3, "kind": "sum", "extra": {"hints": ["two"]}}
    task = dataset_task(
        tmp_path / "sums.jsonl",
        [row],
        prompt="q",
        answer="a",
        answer_pattern="#### (.*)",
        difficulty="level",
        category="kind",
    )
    problem = task.problem(0)
    assert problem.problem_id == "sums.jsonl row 1"
    assert problem.prompt == user("1 + 1?")
    assert (problem.answer, problem.difficulty, problem.category) == ("2", 3, "sum")
    assert problem.columns == {name: value for name, value in row.items() if name != "q"}
    assert task.grade(problem, "2") == Grade(1.0, {"exact": 1.0}, "2")


@pytest.mark.parametrize(
    ("keys", "prompt"),
    [
        ({}, user("1 + 1?")),
        ({"chat": False}, "1 + 1?"),
        ({"prompt_template": "{question} {{x}} {info.level:02d}"}, user("1 + 1? {x} 03")),
        ({"prompt": "messages"}, [{"role": "system", "content": "Add."}, {"role": "user", "content": "1?"}]),
        ({"prompt": "info.parts.1.text"}, user("b")),
    ],
)
def test_prompt_comes_from_column_template_or_messages(tmp_path: Path, keys: dict[str, Any], prompt: object) -> None:
    row = {
        "question": "1 + 1?",
        "answer": "2",
        "info": {"level": 3, "parts": [{"text": "a"}, {"text": "b"}]},
        "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1?", "name": None}],
    }
    assert dataset_task(tmp_path / "sums.jsonl", [row], **keys).problem(0).prompt == prompt


def test_every_column_can_be_written_to_a_stream(tmp_path: Path) -> None:
    import datasets

    columns = {
        "day": [datetime.date(2026, 1, 2)],
        "at": [datetime.datetime(2026, 1, 2, 3)],
        "raw": [b"x"],
        "none": [None],
    }
    rows = datasets.Dataset.from_dict(columns | {"question": ["?"], "answer": [4.5]})
    rows.to_parquet(tmp_path / "rows.parquet")
    problem = dataset_task(tmp_path / "rows.parquet").problem(0)
    assert problem.answer == "4.5"
    assert problem.columns["day"] == "2026-01-02"
    assert problem.columns["at"] == "2026-01-02T03:00:00"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(problem.columns)) == problem.columns


def test_each_epoch_has_every_row_once_in_a_new_order(tmp_path: Path) -> None:
    task = dataset_task(tmp_path / "sums.jsonl", sums(50))
    epochs = [epoch(task, 50, index) for index in range(3)]
    assert len({tuple(prompts) for prompts in epochs}) == 3
    assert all(sorted(prompts) == sorted(epochs[0]) for prompts in epochs)
    assert len(set(epochs[0])) == 50


def test_order_of_the_file_and_by_difficulty(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "sums.jsonl", sums(30))
    assert epoch(dataset_task(path, order="file"), 30) == [row["question"] for row in sums(30)]
    task = dataset_task(path, order="difficulty", difficulty="level")
    epochs = [[task.problem(30 * index + position) for position in range(30)] for index in range(2)]
    for problems in epochs:
        assert [problem.difficulty for problem in problems] == [1] * 10 + [2] * 10 + [3] * 10
    assert texts(epochs[0]) != texts(epochs[1])


def test_order_depends_on_the_seed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "sums.jsonl", sums(50))
    assert epoch(dataset_task(path, seed=1), 50) != epoch(dataset_task(path, seed=2), 50)


def test_problem_does_not_depend_on_earlier_calls(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "sums.jsonl", sums(40))
    first = dataset_task(path)
    in_order = [first.problem(index) for index in range(200)]
    task, indices = dataset_task(path), list(range(200))
    random.Random(0).shuffle(indices)
    assert [task.problem(index) for index in indices] == [in_order[index] for index in indices]


def test_order_is_that_of_earlier_versions(tmp_path: Path) -> None:
    task = dataset_task(tmp_path / "sums.jsonl", sums(10), seed=3)
    assert epoch(task, 10, 5) == [f"{n} + {n}?" for n in (9, 8, 0, 4, 3, 1, 2, 6, 5, 7)]


def test_no_held_out_key_means_no_held_out_problems(tmp_path: Path) -> None:
    task = dataset_task(tmp_path / "sums.jsonl", sums(10))
    assert task.held_out_problems(5) == []
    assert texts(task.evaluation_problems(3)) == ["0 + 0?", "1 + 1?", "2 + 2?"]


def test_evaluation_problems_are_the_held_out_rows_in_file_order(tmp_path: Path) -> None:
    task = dataset_task(tmp_path / "sums.jsonl", sums(100), held_out_fraction=0.3)
    held_out = texts(task.held_out_problems(1000))
    assert texts(task.evaluation_problems()) == sorted(held_out, key=lambda text: int(text.split()[0])) != held_out
    assert sorted(texts(task.evaluation_problems(5))) == sorted(held_out[:5])


def test_a_grading_process_loads_nothing(tmp_path: Path) -> None:
    task = DatasetTask(DatasetSource(path=tmp_path / "missing.jsonl"), rewards=EXACT)
    problem = dataset_task(tmp_path / "sums.jsonl", sums(1)).problem(0)
    assert task.grade(pickle.loads(pickle.dumps(problem)), "0").reward == 1.0


def test_memory_holds_the_orders_of_two_epochs(tmp_path: Path) -> None:
    task = dataset_task(tmp_path / "sums.jsonl", sums(20))
    for index in range(0, 200, 7):
        task.problem(index)
    assert sum(order.nbytes for order in task._orders.values()) <= 2 * 20 * np.dtype(np.int64).itemsize
