"""Rows of files, directories and hub datasets, read by the library `datasets` as memory-mapped Arrow files.

The library converts a dataset once and caches the result. Every later process only maps the cached file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from midflight.config.tasks import DatasetSource
from midflight.errors import MissingExtraError, RecipeError

_FORMATS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
_LINE_FORMATS = (".jsonl", ".ndjson")
_MAX_REASON = 300


class Rows(Protocol):
    """A `datasets.Dataset`: columns and rows of one split."""

    @property
    def column_names(self) -> list[str]: ...

    @property
    def cache_files(self) -> list[dict[str, str]]:
        """Arrow files with the rows, each as {"filename": path}."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any]:
        """Return one row, or the columns of a range of rows as lists."""
        ...

    def select_columns(self, column_names: list[str]) -> Rows: ...


def load_rows(source: DatasetSource, key: str) -> Rows:
    """Return the rows of `path` or `hub_id`. Raises: RecipeError, MissingExtraError."""
    if source.hub_id is not None:
        return _load_hub(source, source.split, key)
    assert source.path is not None
    return _load_path(source.path, source.split, f"{key}.path", f"{key}.split")


def load_held_out_rows(source: DatasetSource, key: str) -> Rows | None:
    """Return the rows of `held_out_path` or `held_out_split`, or None if neither is set.

    Raises: RecipeError, MissingExtraError.
    """
    if source.held_out_path is not None:
        return _load_path(source.held_out_path, None, f"{key}.held_out_path", f"{key}.held_out_path")
    if source.held_out_split is None:
        return None
    if source.hub_id is not None:
        return _load_hub(source, source.held_out_split, key)
    assert source.path is not None
    return _load_path(source.path, source.held_out_split, f"{key}.path", f"{key}.held_out_split")


def _load_path(path: Path, split: str | None, key: str, split_key: str) -> Rows:
    """Return a split of a file or directory; a `split` of None takes the only split, or `test` among several."""
    place = f"{key} = {path}"
    if not path.exists():
        raise RecipeError(f"{place}: there is no such file or directory")
    if path.is_dir():
        with _errors(place, split_key, path):
            splits = _load(str(path))
        return _checked(_choose(splits, split, place, split_key), place)
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    file_format = _FORMATS.get(suffixes[-1].lower()) if suffixes else None
    if file_format is None:
        raise RecipeError(f"{place}: unknown format; known are {', '.join(_FORMATS)}, each also with .gz")
    with _errors(place, split_key, path):
        path.open("rb").close()
        options = {"sep": "\t"} if suffixes[-1].lower() == ".tsv" else {}
        rows: Rows = _load(file_format, data_files=str(path), split=split or "train", **options)
    return _checked(rows, place)


def _load_hub(source: DatasetSource, split: str, key: str) -> Rows:
    assert source.hub_id is not None
    place = f"{key}.hub_id = {source.hub_id!r}"
    with _errors(place, f"{key}.split", None):
        rows: Rows = _load(source.hub_id, source.hub_config, split=split)
    return _checked(rows, place)


def _choose(splits: dict[str, Rows], split: str | None, place: str, split_key: str) -> Rows:
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else "test"
    if split not in splits:
        raise RecipeError(f"{place}: {split_key} = {split!r} is not a split of it; known are {', '.join(splits)}")
    return splits[split]


def _checked(rows: Rows, place: str) -> Rows:
    if not len(rows):
        raise RecipeError(f"{place}: the dataset has no rows")
    return rows


def _load(*arguments: object, **options: object) -> Any:
    """Call `datasets.load_dataset` without progress bars and log lines."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "tasks") from error
    datasets.disable_progress_bars()
    with _quiet("datasets", "huggingface_hub"):
        return datasets.load_dataset(*arguments, **options)


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep these loggers silent: an error becomes one line of ours."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _errors(place: str, split_key: str, path: Path | None) -> Iterator[None]:
    """Turn every error of the library into one line: it raises errors of pyarrow, pandas, fsspec and its own."""
    try:
        yield
    except (MissingExtraError, RecipeError):
        raise
    except ConnectionError as error:
        raise RecipeError(f"{place}: {_offline_advice()}") from error
    except Exception as error:
        reason = _reason(error)
        if "split" in reason:
            raise RecipeError(f"{place}: {split_key}: {reason}") from error
        if path is not None and isinstance(error, OSError) and error.strerror:
            raise RecipeError(f"{place}: {error.strerror}") from error
        if path is not None and path.is_file() and (wrong := _first_wrong_line(path)):
            raise RecipeError(f"{place}: {wrong}") from error
        raise RecipeError(f"{place}: {reason}") from error


def _offline_advice() -> str:
    """Reason why a hub dataset cannot be loaded, and the ways to get it."""
    import datasets

    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
    return (
        f"the dataset is not in the cache {datasets.config.HF_DATASETS_CACHE}, and {reason}; load it once with network"
        " access, copy another machine's cache there, or set path to a file"
    )


def _reason(error: BaseException) -> str:
    """First line of the most specific message: the library wraps the error of a file's reader."""
    if isinstance(error, StopIteration):
        return "the dataset has no rows"
    while type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0].rstrip(".")
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."


def _first_wrong_line(path: Path) -> str | None:
    """Description of the first line of a JSON Lines file that is not a JSON object; None if there is none."""
    if path.suffix.lower() not in _LINE_FORMATS:
        return None
    num_rows = 0
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        num_rows += 1
        parse: Callable[[bytes], Any] = json.loads
        try:
            value = parse(line)
        except UnicodeDecodeError as error:
            return f"line {number} is not UTF-8: {error.reason} at byte {error.start + 1}"
        except json.JSONDecodeError as error:
            return f"line {number} is not JSON: {error.msg} at column {error.colno}"
        if not isinstance(value, dict):
            return f"line {number} is a {type(value).__name__}, not an object with columns"
    return None if num_rows else "the dataset has no rows"
