"""Results of an evaluation: held-out problems of the task, and the sets of [[eval.sets]]."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.evals.answering import Answering, AnswerTable, Evaluator, QuestionSet
from midflight.evals.figures import Figures, figures
from midflight.types import Float64Array, Problem

Key = TypeVar("Key", bound=Hashable)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Questions of an evaluation. `sets` begin with the held-out problems, unless there are none."""

    sets: tuple[QuestionSet, ...]
    greedy: QuestionSet | None  # the held-out problems again, with temperature 0
    hard_from: int  # the difficulty that counts as hard

    @property
    def question_sets(self) -> list[QuestionSet]:
        """All questions, in the order of their answer tables."""
        return [*self.sets, *([self.greedy] if self.greedy else [])]

    @property
    def num_responses(self) -> int:
        return sum(len(questions.problems) * questions.samples for questions in self.question_sets)


@dataclass(frozen=True, slots=True)
class SetResult:
    """Results of one set. Figures are None for a set without problems."""

    num_problems: int
    samples: int
    figures: Figures | None
    by_difficulty: dict[str, Figures]  # buckets of difficulty are 1, 2, 3, 4, 5-8, 9-16, ...
    by_category: dict[str, Figures]
    mean_length: float | None  # tokens
    truncated_fraction: float | None  # share of responses cut off at their largest length
    num_ungraded: int  # responses that could not be graded; they count as wrong


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation. All fields but `sets` are about one response to each held-out problem of the task.

    An accuracy is the mean reward, or None without problems.
    """

    num_problems: int  # may be fewer than requested
    sampled_accuracy: float | None
    greedy_accuracy: float | None
    sampled_accuracy_by_difficulty: dict[str, float]
    hard_from: int
    num_hard_problems: int
    sampled_accuracy_hard: float | None
    mean_length: float | None  # of the sampled responses (tokens)
    num_ungraded: int  # sampled and greedy responses that could not be graded; they count as wrong
    sets: dict[str, SetResult]  # with the sampled responses to held-out problems, as `held_out`

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values; the figures of a set are beside its other fields."""
        values = asdict(self)
        for result in values["sets"].values():
            result.update(_plain(result.pop("figures")))
            for part in ("by_difficulty", "by_category"):
                result[part] = {
                    name: {"num_problems": each["num_problems"]} | _plain(each) for name, each in result[part].items()
                }
        return values


def evaluate(evaluator: Evaluator, plan: EvaluationPlan, on_step: Callable[[], object] = lambda: None) -> Evaluation:
    """Answer all questions with a generator that nobody else uses, and return the results.

    `on_step` is called after every step, which shows that the evaluation has not hung.
    Raises: RolloutError if the grader gives up.
    """
    answering = Answering(evaluator, plan.question_sets)
    while not answering.is_done:
        answering.step(0.0 if answering.is_generating else WAIT_SLICE_S)
        on_step()
    return evaluation_of(plan, answering.tables)


def evaluation_of(plan: EvaluationPlan, tables: Sequence[AnswerTable]) -> Evaluation:
    """Return the results of the answer tables to the plan's questions."""
    failures = [failure for table in tables for failure in table.failures]
    if failures:
        logger.warning(
            "%d responses of an evaluation could not be graded; the last reason: %s", len(failures), failures[-1]
        )
    set_tables = tables[: len(plan.sets)]
    held_out = set_tables[0] if plan.greedy else None
    greedy = tables[-1] if plan.greedy else None
    problems = held_out.questions.problems if held_out else []
    rewards = held_out.rewards[:, 0] if held_out else np.zeros(0)
    hard = np.array([problem.difficulty >= plan.hard_from for problem in problems], bool)
    return Evaluation(
        num_problems=len(problems),
        sampled_accuracy=mean_or_none(rewards),
        greedy_accuracy=mean_or_none(greedy.rewards) if greedy else None,
        sampled_accuracy_by_difficulty={
            name: float(rewards[rows].mean()) for name, rows in _by_difficulty(problems).items()
        },
        hard_from=plan.hard_from,
        num_hard_problems=int(hard.sum()),
        sampled_accuracy_hard=mean_or_none(rewards[hard]),
        mean_length=mean_or_none(held_out.lengths) if held_out else None,
        num_ungraded=sum(len(table.failures) for table in (held_out, greedy) if table),
        sets={table.questions.name: _set_result(table) for table in set_tables},
    )


def mean_or_none(values: Float64Array) -> float | None:
    """Return the mean, or None if there are no values."""
    return float(values.mean()) if values.size else None


def _set_result(table: AnswerTable) -> SetResult:
    questions = table.questions
    by_difficulty = _by_difficulty(questions.problems)
    by_category = _rows_by([problem.category for problem in questions.problems])
    return SetResult(
        num_problems=len(questions.problems),
        samples=questions.samples,
        figures=figures(table.rewards, table.correct, table.answers),
        by_difficulty=_parts(table, by_difficulty if by_difficulty.keys() != {"0"} else {}),
        by_category=_parts(table, {name: rows for name, rows in sorted(by_category.items()) if name}),
        mean_length=mean_or_none(table.lengths),
        truncated_fraction=mean_or_none(table.truncated.astype(np.float64)),
        num_ungraded=len(table.failures),
    )


def _parts(table: AnswerTable, rows_by_name: Mapping[str, Sequence[int]]) -> dict[str, Figures]:
    parts = {
        name: figures(table.rewards[rows], table.correct[rows], [table.answers[row] for row in rows])
        for name, rows in rows_by_name.items()
    }
    return {name: part for name, part in parts.items() if part}


def _by_difficulty(problems: Sequence[Problem]) -> dict[str, list[int]]:
    """Rows of the problems in each bucket of difficulty."""
    buckets = _rows_by([_bucket(problem.difficulty) for problem in problems])
    return {str(low) if low == high else f"{low}-{high}": rows for (low, high), rows in sorted(buckets.items())}


def _rows_by(keys: Sequence[Key]) -> dict[Key, list[int]]:
    rows: defaultdict[Key, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return dict(rows)


def _bucket(difficulty: int) -> tuple[int, int]:
    """Bucket of a difficulty: single values up to 4, then doubling ranges."""
    if difficulty <= 4:
        return difficulty, difficulty
    high = 1 << (difficulty - 1).bit_length()
    return high // 2 + 1, high


def _plain(part: dict[str, Any] | None) -> dict[str, Any]:
    return {name: (part or {}).get(name) for name in ("avg", "pass_at", "maj")}
