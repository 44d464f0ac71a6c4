"""Datasets that cannot be used: one line names the key, the file or row, and the values that would work."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dataset_files import EXACT, dataset_task, epoch, sums, write_lines
from midflight.config.tasks import DatasetSource
from midflight.envs.datasets.task import DatasetTask
from midflight.errors import RecipeError

ROW = {"question": "1 + 1?", "answer": "2", "level": 1, "info": {"kind": "sum"}, "turns": [{"role": "user"}]}


def refusal(path: Path, rows: list[Any] | None = None, **keys: Any) -> str:
    with pytest.raises(RecipeError) as refused:
        dataset_task(path, rows, **keys).problem(0)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    return message.replace(str(path.parent), "DIR")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"prompt": "questions"},
            "task.prompt = 'questions': rows.jsonl has no column 'questions'; it has question, answer, level, info,"
            " turns; did you mean 'question'?",
        ),
        ({"answer": "anwser"}, "task.answer = 'anwser': rows.jsonl has no column .*; did you mean 'answer'?"),
        ({"difficulty": "terms"}, "task.difficulty = 'terms': rows.jsonl has no column 'terms'; it has question, .*"),
        ({"held_out_column": "test"}, "task.held_out_column = 'test': rows.jsonl has no column 'test'; .*"),
        ({"prompt_template": "{q}"}, "task.prompt_template = '{q}': rows.jsonl has no column 'q'; it has question, .*"),
        ({"where": "lewel < 3"}, "task.where = 'lewel < 3': rows.jsonl has no column 'lewel'; .* mean 'level'?"),
        ({"prompt": "info.knd"}, "task.prompt: rows.jsonl row 1 has no 'info.knd'; the column is {'kind': 'sum'}"),
        ({"prompt": "level"}, "task.prompt = 'level': rows.jsonl row 1 is a int, neither text nor a list of messages"),
        (
            {"prompt": "turns"},
            "task.prompt = 'turns': rows.jsonl row 1 has a message {'role': 'user'}, not an object .*",
        ),
        (
            {"difficulty": "question"},
            "task.difficulty = 'question': rows.jsonl row 1 has '1 + 1?', not an integer; as category, the column .*",
        ),
        ({"answer_pattern": "("}, "task.answer_pattern = '(' is not a regular expression: missing ).*"),
        ({"answer_pattern": "a"}, "task.answer_pattern = 'a' has no group; parentheses around the answer would work"),
        ({"answer_pattern": "(a)"}, "task.answer_pattern = '(a)' finds no answer in rows.jsonl row 1: '2'"),
        ({"where": "level <"}, "task.where = 'level <' is not an expression: .*"),
        (
            {"where": "level < answer"},
            "task.where = 'level < answer' fails in rows.jsonl row 1 with level = 1, answer = '2': '<' not .*",
        ),
        ({"where": "level"}, "task.where = 'level' is 1 in rows.jsonl row 1, neither true nor false"),
        ({"where": "level > 1"}, "task: no training rows are left of the 1 rows .*: where = 'level > 1' drops 1"),
        ({"prompt_template": "Hi"}, "task.prompt_template = 'Hi' names no column, .*"),
        ({"prompt_template": "{question} {}"}, ".* has braces without a column; write {{ and }} for braces .*"),
        ({"prompt_template": "{question"}, ".*; write {{ and }} for braces that are text"),
        ({"prompt_template": "{level:s}"}, ".* fails in rows.jsonl row 1: Unknown format code 's' .*"),
        ({"held_out_column": "level"}, ""),
        ({"held_out_column": "answer"}, "task.held_out_column = 'answer': rows.jsonl row 1 has '2', .*"),
        ({"held_out_path": "/nowhere"}, "task.held_out_path = /nowhere: there is no such file or directory"),
        ({"split": "test"}, 'task.path = DIR/rows.jsonl: task.split: Unknown split "test". .*train.*'),
    ],
)
def test_wrong_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    found = refusal(tmp_path / "rows.jsonl", [ROW], **keys)
    pattern = re.escape(message).replace(r"\.\*", ".*")
    assert re.fullmatch(pattern or ".*", found), found


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "task.path = DIR/rows.jsonl: the dataset has no rows"),
        (["", ""], "task.path = DIR/rows.jsonl: the dataset has no rows"),
        (
            [ROW, '{"question": '],
            "task.path = DIR/rows.jsonl: line 2 is not JSON: Expecting value at column 14",
        ),
        ([ROW, "[1, 2]"], "task.path = DIR/rows.jsonl: line 2 is a list, not an object with columns"),
        ([ROW, {"question": None, "answer": ""}], "task.prompt = 'question': rows.jsonl row 2 is empty, neither .*"),
    ],
)
def test_wrong_rows(tmp_path: Path, rows: list[Any], message: str) -> None:
    found = refusal(tmp_path / "rows.jsonl", rows)
    assert re.fullmatch(re.escape(message).replace(r"\.\*", ".*"), found), found


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.parquet", b"no", "Parquet file size is 2 bytes, .*"),
        ("rows.csv", b"question,answer\n1,2\n1,2,3\n", ".*Expected 2 fields in line 3, saw 3.*"),
        ("rows.txt", b"", "unknown format; known are .jsonl, .ndjson, .json, .parquet, .csv, .tsv, each also with .gz"),
        ("rows", b"", "unknown format; .*"),
    ],
)
def test_wrong_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    found = refusal(tmp_path / name)
    place = f"task.path = DIR/{name}: "
    assert re.fullmatch(re.escape(place + message).replace(r"\.\*", ".*"), found), found


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "?", "answer": "\xe9"}\n')
    assert refusal(tmp_path / "rows.jsonl").startswith("task: rows 1 to 1 of rows.jsonl are not UTF-8 text: ")


def test_missing_file_and_empty_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.jsonl") == "task.path = DIR/no.jsonl: there is no such file or directory"
    (tmp_path / "empty").mkdir()
    assert re.fullmatch(
        r"task.path = DIR/empty: The directory at .*empty doesn't contain any data files", refusal(tmp_path / "empty")
    )


def test_missing_split_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "sums").mkdir()
    for split in ("train", "test"):
        write_lines(tmp_path / "sums" / f"{split}.jsonl", sums(3))
    assert refusal(tmp_path / "sums", split="dev") == (
        "task.path = DIR/sums: task.split = 'dev' is not a split of it; known are train, test"
    )


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(sums(5))
    lines = write_lines(tmp_path / "rows.jsonl", sums(5))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    rows.to_json(tmp_path / "rows.json", lines=False)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_csv(tmp_path / "rows.csv")
    rows.to_csv(tmp_path / "rows.tsv", sep="\t")
    names = ("rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet", "rows.csv", "rows.tsv")
    for name in names:
        task = dataset_task(tmp_path / name, order="file", difficulty="level")
        assert epoch(task, 5) == [row["question"] for row in sums(5)]
        assert [task.problem(index).answer for index in range(5)] == ["0", "2", "4", "6", "8"]


def test_hub_dataset_that_is_not_cached(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        DatasetTask(DatasetSource(hub_id="nobody/sums", prompt="question"), rewards=EXACT).problem(0)
    assert re.fullmatch(
        r"task\.hub_id = 'nobody/sums': the dataset is not in the cache .*, and HF_HUB_OFFLINE is set; load it once"
        r" with network access, copy another machine's cache there, or set path to a file",
        str(refused.value),
    )


def test_hub_dataset_comes_from_the_cache(tmp_path: Path) -> None:
    import datasets

    write_lines(tmp_path / "train.jsonl", sums(5))
    write_lines(tmp_path / "test.jsonl", sums(9)[5:])
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    prepared = datasets.load_dataset_builder("json", "main", data_files=files, cache_dir=str(tmp_path))
    prepared.download_and_prepare(file_format="arrow")
    cached = Path(datasets.config.HF_DATASETS_CACHE) / "somebody___sums" / "main" / "0.0.0" / "0123"
    cached.mkdir(parents=True)
    for path in Path(prepared.cache_dir).iterdir():
        (cached / path.name.replace("json-", "sums-")).write_bytes(path.read_bytes())
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"config_name": "main", "dataset_name": "sums"}))
    keys: dict[str, Any] = {"prompt": "question", "held_out_split": "test"}
    source = DatasetSource(hub_id="somebody/sums", hub_config="main", **keys)
    task = DatasetTask(source, rewards=EXACT)
    assert task.problem(0).problem_id.startswith("somebody/sums main train row ")
    assert len(task.held_out_problems(9)) == 4
    with pytest.raises(RecipeError, match=r"^task\.hub_id = 'somebody/sums': .*'other'"):
        DatasetTask(source.model_copy(update={"hub_config": "other"}), rewards=EXACT).problem(0)
    with pytest.raises(RecipeError, match=r"^task\.hub_id = 'somebody/sums': task\.split: .*Unknown split \"dev\""):
        DatasetTask(source.model_copy(update={"split": "dev"}), rewards=EXACT).problem(0)
