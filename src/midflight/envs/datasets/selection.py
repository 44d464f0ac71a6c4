"""Row numbers of the training and the held-out rows: filters, then the held-out split.

A selection is written once, beside the cached rows. Later processes read it instead of evaluating expressions and
counting tokens again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from midflight.config.tasks import DatasetSource
from midflight.envs.datasets.expressions import RowExpression
from midflight.envs.datasets.loading import Rows
from midflight.envs.datasets.reading import RowReader, check_columns, top_column, value_at
from midflight.errors import RecipeError
from midflight.types import BoolArray, Int64Array, Problem, Text

_FORMAT = 1  # increment with every change to the arrays of a selection, or to the rules that choose rows
_ROWS_AT_ONCE = 1000
_HELD_OUT_VALUES = {"true": True, "1": True, "test": True, "false": False, "0": False, "train": False}

Hashes = npt.NDArray[np.uint64]


class PromptLimit(Protocol):
    """The limit of `drop_long_prompts`."""

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of a prompt."""
        ...

    @property
    def identity(self) -> str:
        """Text that changes with everything the number of tokens depends on, such as the tokenizer."""
        ...

    def count(self, prompts: Sequence[Text]) -> Sequence[int]:
        """Return the number of tokens of each prompt, as the model sees it."""
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows that problems are made from."""

    training: Int64Array  # row numbers, ascending
    difficulties: Int64Array  # of the training rows
    held_out: Int64Array  # row numbers, in an order drawn by the prompts' hashes


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the name that messages and problem ids show."""

    name: str
    rows: Rows

    def place(self, index: int) -> str:
        """Name of a row; rows count from 1, as lines do."""
        return f"{self.name} row {index + 1}"


@dataclass(slots=True)
class _Scan:
    """Rows of a table that the filters keep."""

    indices: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    difficulties: list[int] = field(default_factory=list)
    marks: list[bool] = field(default_factory=list)  # values of held_out_column
    dropped: Counter[str] = field(default_factory=Counter)  # key -> rows

    def hash_array(self) -> Hashes:
        return np.array(self.hashes, np.uint64)


class Selector:
    """Chooses the rows of a source.

    Raises: RecipeError if a column is missing, a row is not usable, no row is left, or a prompt is on both sides.
    """

    def __init__(self, source: DatasetSource, key: str, reader: RowReader, limit: PromptLimit | None) -> None:
        self._source, self._key, self._reader = source, key, reader
        self._limit = limit if source.drop_long_prompts else None
        self._where = RowExpression(source.where, f"{key}.where") if source.where is not None else None

    def select(self, table: Table, held_out_table: Table | None) -> Selection:
        """Return the selection, from its file if the same one was written before."""
        path = self._path([table, held_out_table] if held_out_table else [table])
        if path is not None and (written := _read(path)):
            return written
        selection = self._choose(table, held_out_table)
        if path is not None:
            _write(selection, path)
        return selection

    # --- filters ----------------------------------------------------------------------------------------------

    def _scan(self, table: Table, mark: str | None = None) -> _Scan:
        """Read the rows of a table, and the column `mark` that says which rows are held out."""
        columns = dict.fromkeys(self._where.columns, f"where = {self._source.where!r}") if self._where else {}
        columns |= self._reader.columns | ({mark: f"held_out_column = {mark!r}"} if mark else {})
        known = table.rows.column_names
        check_columns(columns, known, self._key, table.name)
        scan = _Scan()
        needed = list(dict.fromkeys(top_column(column, known) for column in columns))
        for batch in self._batches(Table(table.name, table.rows.select_columns(needed))):
            kept = [
                (index, row, self._reader.problem(row, table.place(index)))
                for index, row in batch
                if (self._is_wanted(row, table.place(index), scan))
            ]
            for index, row, problem in self._short_enough(kept, scan):
                scan.indices.append(index)
                scan.hashes.append(_hash(problem.text))
                scan.difficulties.append(problem.difficulty)
                if mark:
                    scan.marks.append(self._is_marked(value_at(row, mark), table.place(index)))
        return scan

    def _batches(self, table: Table) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Yield lists of row numbers and rows."""
        num_rows = len(table.rows)
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, num_rows)
            try:
                columns = {name: list(values) for name, values in table.rows[start:stop].items()}
            except UnicodeDecodeError as error:
                place = f"rows {start + 1} to {stop} of {table.name}"
                raise RecipeError(f"{self._key}: {place} are not UTF-8 text: {error}") from error
            values = zip(*columns.values(), strict=True)
            yield [(index, dict(zip(columns, row, strict=True))) for index, row in enumerate(values, start)]

    def _is_wanted(self, row: dict[str, Any], place: str, scan: _Scan) -> bool:
        wanted = self._where is None or self._where.is_true(row, place)
        scan.dropped[f"where = {self._source.where!r}"] += not wanted
        return wanted

    def _short_enough(
        self, kept: list[tuple[int, dict[str, Any], Problem]], scan: _Scan
    ) -> list[tuple[int, dict[str, Any], Problem]]:
        if self._limit is None or not kept:
            return kept
        counts = self._limit.count([problem.prompt for _, _, problem in kept])
        short = [item for item, count in zip(kept, counts, strict=True) if count <= self._limit.max_tokens]
        scan.dropped[f"drop_long_prompts (more than {self._limit.max_tokens} tokens)"] += len(kept) - len(short)
        return short

    def _is_marked(self, value: Any, place: str) -> bool:
        marked = _HELD_OUT_VALUES.get(str(value).lower())
        if marked is None:
            raise RecipeError(
                f"{self._key}.held_out_column = {self._source.held_out_column!r}: {place} has {value!r:.60}, which is"
                " not one of true, false, 'test' and 'train'"
            )
        return marked

    # --- the split --------------------------------------------------------------------------------------------

    def _choose(self, table: Table, held_out_table: Table | None) -> Selection:
        source = self._source
        scan = self._scan(table, source.held_out_column)
        hashes, indices = scan.hash_array(), np.array(scan.indices, np.int64)
        is_held_out: BoolArray = np.zeros(len(indices), bool)
        held_out, held_out_hashes = indices[:0], hashes[:0]
        if held_out_table:
            held_out_scan = self._scan(held_out_table)
            held_out, held_out_hashes = np.array(held_out_scan.indices, np.int64), held_out_scan.hash_array()
        else:
            is_held_out = np.array(scan.marks, bool) if source.held_out_column else _drawn(hashes, source)
            held_out, held_out_hashes = indices[is_held_out], hashes[is_held_out]
        both = np.isin(hashes, held_out_hashes) & ~is_held_out
        if both.any() and not source.drop_held_out_prompts:
            first = indices[both][0]
            same = held_out[held_out_hashes == hashes[both][0]][0]
            raise RecipeError(
                f"{self._key}: {both.sum()} training rows have the prompt of a held-out row; the first is"
                f" {table.place(first)}, as {(held_out_table or table).place(same)}; drop_held_out_prompts = true would"
                " drop them"
            )
        scan.dropped["drop_held_out_prompts"] += int(both.sum())
        training = ~is_held_out & ~both
        self._check_not_empty(table, scan, int(is_held_out.sum()), int(training.sum()), held_out)
        order = np.argsort(held_out_hashes, kind="stable")
        return Selection(indices[training], np.array(scan.difficulties, np.int64)[training], held_out[order])

    def _check_not_empty(
        self, table: Table, scan: _Scan, num_held_out: int, num_training: int, held_out: Int64Array
    ) -> None:
        taken = [f"{name} drops {count}" for name, count in scan.dropped.items() if count]
        if num_held_out:
            taken.append(f"{num_held_out} are held out")
        if not num_training:
            raise RecipeError(
                f"{self._key}: no training rows are left of the {len(table.rows)} rows of {table.name}:"
                f" {', '.join(taken)}"
            )
        held_out_keys = _held_out_keys(self._source)
        if held_out_keys and not len(held_out):
            advice = "; a larger share would work" if self._source.held_out_fraction else ""
            raise RecipeError(
                f"{self._key}.{held_out_keys[0]} = {getattr(self._source, held_out_keys[0])} holds out none of the"
                f" {num_training} rows that the filters keep{advice}"
            )

    # --- the file ---------------------------------------------------------------------------------------------

    def _path(self, tables: Sequence[Table]) -> Path | None:
        """Path of the file of this selection; None for rows that are not cached."""
        files = [Path(file["filename"]) for table in tables for file in table.rows.cache_files]
        if not files:
            return None
        stats = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
        names = DatasetSource.model_fields.keys() - {"rewards", "order"}
        options = self._source.model_dump(mode="json", include=names)
        limit = (self._limit.max_tokens, self._limit.identity) if self._limit else None
        identity = json.dumps([_FORMAT, stats, options, limit]).encode()
        return files[0].parent / f"midflight-{hashlib.blake2b(identity, digest_size=16).hexdigest()}.npz"


def has_held_out_key(source: DatasetSource) -> bool:
    """True if a key of the source says which rows are held out."""
    return bool(_held_out_keys(source))


def _held_out_keys(source: DatasetSource) -> list[str]:
    names = ("held_out_fraction", "held_out_column", "held_out_path", "held_out_split")
    return [name for name in names if getattr(source, name)]


def _hash(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _drawn(hashes: Hashes, source: DatasetSource) -> BoolArray:
    """True for prompts that `held_out_fraction` holds out: a prompt's text alone decides.

    Equal prompts are therefore on one side, in every source, for every seed, filter and later version of the file.
    """
    return hashes < np.uint64(min(int(source.held_out_fraction * 2.0**64), 2**64 - 1))


def _read(path: Path) -> Selection | None:
    """Return the selection in a file; None if there is no file, or a damaged one."""
    names = [item.name for item in dataclasses.fields(Selection)]
    with (
        contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile),
        np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays,
    ):
        return Selection(**{name: arrays[name] for name in names})
    return None


def _write(selection: Selection, path: Path) -> None:
    """Write a selection; a cache that cannot be written costs the next process the time, nothing else."""
    temporary = path.with_name(f"{path.stem}-{os.getpid()}.npz")
    with contextlib.suppress(OSError):
        try:
            np.savez(temporary, **dataclasses.asdict(selection))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
