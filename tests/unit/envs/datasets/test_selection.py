"""Filters, the held-out split, and the file that keeps a selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dataset_files import EXACT, dataset_task, epoch, sums, texts, write_lines
from midflight.config.tasks import DatasetSource
from midflight.envs.datasets.task import DatasetTask
from midflight.errors import RecipeError
from midflight.types import Text


@dataclass
class WordLimit:
    """Implements PromptLimit; a token is a word."""

    max_tokens: int
    identity: str = "words"
    counted: list[int] = field(default_factory=list)

    def count(self, prompts: Sequence[Text]) -> list[int]:
        self.counted.append(len(prompts))
        return [len(str(prompt[0]["content"] if isinstance(prompt, list) else prompt).split()) for prompt in prompts]


def training(task: DatasetTask) -> set[str]:
    return set(texts([task.problem(index) for index in range(len(task._rows.selection.training))]))


@pytest.mark.parametrize(
    ("where", "levels"),
    [
        ("level <= 2", {1, 2}),
        ("level in [1, 3] and len(question) > 0", {1, 3}),
        ("not answer.endswith('0') and int(answer) % 2 == 0 and level == 2", {2}),
        ("any(level == wanted for wanted in (1, 2))", {1, 2}),
    ],
)
def test_where_keeps_rows(tmp_path: Path, where: str, levels: set[int]) -> None:
    task = dataset_task(tmp_path / "sums.jsonl", sums(30), difficulty="level", where=where)
    assert {task.problem(index).difficulty for index in range(60)} == levels


def test_long_prompts_are_dropped_in_training_and_held_out_rows(tmp_path: Path) -> None:
    rows = [{"question": "word " * n, "answer": "", "test": n % 2 == 0} for n in range(1, 21)]
    path = write_lines(tmp_path / "words.jsonl", rows)
    source = DatasetSource(path=path, prompt="question", held_out_column="test", drop_long_prompts=True)
    task = DatasetTask(source, rewards=EXACT, limit=WordLimit(10))
    assert sorted(len(text.split()) for text in training(task)) == [1, 3, 5, 7, 9]
    assert sorted(len(text.split()) for text in texts(task.held_out_problems(100))) == [2, 4, 6, 8, 10]


def test_equal_prompts_are_held_out_together(tmp_path: Path) -> None:
    task = dataset_task(tmp_path / "sums.jsonl", sums(100) * 3, held_out_fraction=0.3)
    held_out = set(texts(task.held_out_problems(1000)))
    assert not held_out & training(task)
    assert held_out | training(task) == {row["question"] for row in sums(100)}
    assert 15 <= len(held_out) <= 45


def test_held_out_prompts_ignore_seed_filters_and_other_rows(tmp_path: Path) -> None:
    small = dataset_task(tmp_path / "a.jsonl", sums(100), held_out_fraction=0.3)
    held_out = set(texts(small.held_out_problems(1000)))
    for task in (
        dataset_task(tmp_path / "b.jsonl", sums(200)[::-1], held_out_fraction=0.3),
        dataset_task(tmp_path / "c.jsonl", sums(100), held_out_fraction=0.3, where="level > 1", seed=5),
        dataset_task(tmp_path / "d.jsonl", sums(100), held_out_fraction=0.2),
    ):
        assert not held_out & training(task) or task._source.held_out_fraction < 0.3
        assert held_out >= set(texts(task.held_out_problems(1000))) & {row["question"] for row in sums(100)}


@pytest.mark.parametrize("values", [(True, False), (1, 0), ("test", "train")])
def test_column_holds_rows_out(tmp_path: Path, values: tuple[Any, Any]) -> None:
    rows = [row | {"side": values[row["level"] > 1]} for row in sums(9)]
    task = dataset_task(tmp_path / "sums.jsonl", rows, held_out_column="side")
    assert sorted(texts(task.held_out_problems(9))) == [row["question"] for row in sums(9)[::3]]
    assert len(training(task)) == 6


def test_file_and_split_hold_rows_out(tmp_path: Path) -> None:
    directory = tmp_path / "sums"
    directory.mkdir()
    write_lines(directory / "train.jsonl", sums(9)[2:])
    test = write_lines(directory / "test.jsonl", sums(9)[:2])
    for keys in ({"held_out_path": test}, {"held_out_split": "test"}):
        task = dataset_task(directory, **keys)
        assert sorted(texts(task.held_out_problems(9))) == ["0 + 0?", "1 + 1?"]
        assert len(training(task)) == 7


def test_prompt_on_both_sides_is_refused_or_dropped(tmp_path: Path) -> None:
    test = write_lines(tmp_path / "test.jsonl", sums(9)[4:6])
    path = write_lines(tmp_path / "train.jsonl", sums(9))
    with pytest.raises(RecipeError) as refused:
        dataset_task(path, held_out_path=test).problem(0)
    assert str(refused.value) == (
        "task: 2 training rows have the prompt of a held-out row; the first is train.jsonl row 5, as test.jsonl row 1;"
        " drop_held_out_prompts = true would drop them"
    )
    assert len(training(dataset_task(path, held_out_path=test, drop_held_out_prompts=True))) == 7


def test_empty_selection_says_how_many_rows_each_filter_takes(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", sums(9))
    source = DatasetSource(
        path=tmp_path / "train.jsonl",
        prompt="question",
        where="level == 1",
        drop_long_prompts=True,
        held_out_path=write_lines(tmp_path / "test.jsonl", sums(12)[9:]),
    )
    with pytest.raises(RecipeError) as refused:
        DatasetTask(source, rewards=EXACT, limit=WordLimit(2)).problem(0)
    assert str(refused.value) == (
        "task: no training rows are left of the 9 rows of train.jsonl: where = 'level == 1' drops 6, drop_long_prompts"
        " (more than 2 tokens) drops 3"
    )


def test_fraction_that_holds_out_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"held_out_fraction = 0.0001 holds out none of the 9 rows .* a larger share"):
        dataset_task(tmp_path / "sums.jsonl", sums(9), held_out_fraction=0.0001).problem(0)


def test_selection_is_made_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "sums.jsonl", sums(50))
    keys: dict[str, Any] = {"path": path, "prompt": "question", "drop_long_prompts": True, "held_out_fraction": 0.2}
    limits = [WordLimit(3), WordLimit(3), WordLimit(3, "other words"), WordLimit(4)]
    tasks = [DatasetTask(DatasetSource(**keys), rewards=EXACT, limit=limit) for limit in limits]
    orders = [epoch(task, 30) for task in tasks]
    assert all(order == orders[0] for order in orders)
    assert [limit.counted for limit in limits] == [[50], [], [50], [50]]


def test_damaged_selection_is_made_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "damaged.jsonl", sums(20))
    rows = dataset_task(path)._rows.training.rows
    (written,) = Path(rows.cache_files[0]["filename"]).parent.glob("midflight-*.npz")
    first = epoch(dataset_task(path), 20)
    written.write_bytes(written.read_bytes()[:100])
    assert epoch(dataset_task(path), 20) == first
