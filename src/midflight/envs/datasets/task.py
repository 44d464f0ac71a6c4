"""A dataset as a task: a problem is a pure function of the dataset, the options, the seed and the index."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midflight.config.tasks import DatasetSource
from midflight.envs.datasets.loading import load_held_out_rows, load_rows
from midflight.envs.datasets.reading import RowReader
from midflight.envs.datasets.selection import PromptLimit, Selection, Selector, Table, has_held_out_key
from midflight.envs.rewards.terms import Rewards
from midflight.types import Grade, Int64Array, Problem


class DatasetTask:
    """Implements GradedTask.

    `problem(index)` is row `index % rows` of epoch `index // rows`. A run's group ids are the indices, so the position
    in the dataset is part of every checkpoint.

    Nothing is loaded before the first problem: a grading process gets each problem with its row. Rows stay in the
    memory-mapped file; only the row numbers and the order of one or two epochs are in memory.
    Raises: RecipeError, from every method that returns problems.
    """

    def __init__(
        self,
        source: DatasetSource,
        *,
        rewards: Rewards,
        seed: int = 0,
        limit: PromptLimit | None = None,
        key: str = "task",
    ) -> None:
        """Store the arguments. `limit` is needed for `drop_long_prompts`; `key` is the recipe's key of the source."""
        self._source, self._rewards, self._seed, self._key = source, rewards, seed, key
        self._limit = limit
        self._orders: dict[int, Int64Array] = {}  # epoch -> positions in the selection; at most two epochs

    def problem(self, index: int) -> Problem:
        """Return the `index`-th training problem."""
        rows = self._rows
        epoch, position = divmod(index, len(rows.selection.training))
        return rows.problem(rows.training, self._order(epoch)[position])

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Return up to `num_problems` held-out problems, the same ones for every seed; none without a held-out key."""
        rows = self._rows
        return [rows.problem(rows.held_out, index) for index in rows.selection.held_out[:num_problems]]

    def evaluation_problems(self, num_problems: int | None = None) -> list[Problem]:
        """Return the held-out problems, or all problems without a held-out key, in the order of the file."""
        rows = self._rows
        if has_held_out_key(self._source):
            return [rows.problem(rows.held_out, index) for index in np.sort(rows.selection.held_out[:num_problems])]
        return [rows.problem(rows.training, index) for index in rows.selection.training[:num_problems]]

    @property
    def wants_groups(self) -> bool:
        return self._rewards.wants_groups

    def grade(self, problem: Problem, response: str) -> Grade:
        return self._rewards.grade(problem, response)

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade | BaseException]:
        return self._rewards.grade_group(problem, responses)

    def _order(self, epoch: int) -> Int64Array:
        """Rows of an epoch in the order of training. Rollouts in flight may belong to two epochs."""
        if epoch not in self._orders:
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: self._drawn_order(epoch)}
        return self._orders[epoch]

    def _drawn_order(self, epoch: int) -> Int64Array:
        selection = self._rows.selection
        if self._source.order == "file":
            return selection.training
        # Sorting the raw output, because NumPy may change its method of shuffling, but not the output of a generator.
        # The name keeps two datasets of a mixture from having the same order.
        name = zlib.crc32(self._rows.training.name.encode())
        numbers = np.random.PCG64([self._seed, epoch, name]).random_raw(len(selection.training))
        keys = (numbers, selection.difficulties) if self._source.order == "difficulty" else (numbers,)
        return selection.training[np.lexsort(keys)]

    @functools.cached_property
    def _rows(self) -> _SelectedRows:
        source, key = self._source, self._key
        reader = RowReader(source, key)
        selector = Selector(source, key, reader, self._limit)
        training = Table(_name(source), load_rows(source, key))
        held_out = None
        if (rows := load_held_out_rows(source, key)) is not None:
            held_out = Table(_held_out_name(source), rows)
        selected = _SelectedRows(reader, training, held_out or training, selector.select(training, held_out))
        self._rewards.check(selected.problem(training, selected.selection.training[0]))
        return selected


@dataclass(frozen=True, slots=True)
class _SelectedRows:
    reader: RowReader
    training: Table
    held_out: Table
    selection: Selection

    def problem(self, table: Table, index: np.int64) -> Problem:
        return self.reader.problem(table.rows[int(index)], table.place(int(index)))


def _name(source: DatasetSource) -> str:
    """Name of the rows in problem ids and messages, such as `train.jsonl` or `openai/gsm8k main train`."""
    if source.path is not None:
        return f"{source.path.name} {source.split}" if source.path.is_dir() else source.path.name
    return " ".join(filter(None, (source.hub_id, source.hub_config, source.split)))


def _held_out_name(source: DatasetSource) -> str:
    if source.held_out_path is not None:
        return source.held_out_path.name
    return _name(source.model_copy(update={"split": source.held_out_split}))
