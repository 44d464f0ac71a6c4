"""The weighted sum of rewards, and the check of the values that reward functions return."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
import weakref
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from midflight.envs.one_turn import grade_alone
from midflight.envs.rewards.signatures import RewardFunction
from midflight.errors import RecipeError
from midflight.types import Grade, Problem

_MAX_SHOWN = 60  # characters of a wrong value in a message


class RewardError(Exception):
    """A reward function failed on a response; the text names the function and the problem."""


@dataclass(frozen=True, slots=True)
class Term:
    """A reward function with its name in the metrics and its weight."""

    name: str
    function: RewardFunction
    weight: float = 1.0


Value = Grade | None  # None: the reward does not apply to this response
Outcome = list[Value] | BaseException  # of one call, by response


class Rewards:
    """Sum of weighted terms. The components of a grade are the values of the terms, without their weights.

    A term that does not apply to a response adds nothing and has no component. If a term returns a Grade, its
    components follow the term's name and a slash; the answer is that of the first term with an answer.
    Raises: RecipeError if two terms have the same name.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = tuple(terms)
        names = [term.name for term in terms]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(
                    f"task.rewards: {names.count(name)} terms have the name {name!r}; give each an own one, such as"
                    f' {{type = ..., name = "{name}_2"}}'
                )
        self._loop: asyncio.AbstractEventLoop | None = (
            None  # one event loop, so that clients of async rewards stay connected
        )

    @property
    def wants_groups(self) -> bool:
        """True if a term needs all responses to a problem at once."""
        return any(term.function.whole_group for term in self.terms)

    def check(self, problem: Problem) -> None:
        """Check that the problem has every column that the reward functions need, before a run starts.

        Reward objects with a method `check(problem)` check more, such as a server that must answer.
        Raises: RecipeError.
        """
        for term in self.terms:
            missing = term.function.missing_columns(problem)
            if missing:
                raise RecipeError(
                    f"task.rewards: {term.function.label} needs the column {missing[0]!r}; the rows have"
                    f" {', '.join(problem.columns) or 'no further columns'}"
                )
            if check := getattr(term.function.function, "check", None):
                check(problem)

    def grade(self, problem: Problem, response: str) -> Grade:
        """Return the sum for one response. Raises: RewardError."""
        return grade_alone(self, problem, response)

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade | BaseException]:
        """Return the sum for each response, or the error of a term that failed on this response alone.

        Async functions run at the same time.
        Raises: RewardError if a term for the whole group failed.
        """
        calls = [(term, part) for term in self.terms for part in _parts(term, responses)]
        results = [_attempt(term, problem, part) for term, part in calls]
        if any(inspect.isawaitable(result) for result in results):
            results = self._event_loop().run_until_complete(_gathered(calls, problem, results))
        outcomes = iter(
            [_checked(term, problem, part, result) for (term, part), result in zip(calls, results, strict=True)]
        )
        by_term = [_by_response(term, outcomes, len(responses)) for term in self.terms]
        return [self._sum([values[index] for values in by_term]) for index in range(len(responses))]

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Only closes: the garbage collector may call it while another event loop runs.
            weakref.finalize(self, self._loop.close)
        return self._loop

    def _sum(self, values: Sequence[Value | BaseException]) -> Grade | BaseException:
        total, answer = 0.0, None
        components: dict[str, float] = {}
        for term, value in zip(self.terms, values, strict=True):
            if isinstance(value, BaseException):
                return value
            if value is None:
                continue
            total += term.weight * value.reward
            components[term.name] = value.reward
            components |= {f"{term.name}/{name}": number for name, number in value.components.items()}
            answer = value.answer if answer is None else answer
        return Grade(total, components, answer)


def _parts(term: Term, responses: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the responses of each call of the term."""
    if term.function.whole_group:
        yield responses
    else:
        for response in responses:
            yield (response,)


def _attempt(term: Term, problem: Problem, responses: Sequence[str]) -> Any:
    """Return the function's result, which may be an awaitable, or a RewardError."""
    try:
        return term.function(problem, responses)
    except (Exception, SystemExit) as error:
        return _failed(term, problem, error)


async def _gathered(calls: Sequence[tuple[Term, Sequence[str]]], problem: Problem, results: Sequence[Any]) -> list[Any]:
    async def settled(term: Term, result: Awaitable[Any]) -> Any:
        try:
            return await result
        except (Exception, SystemExit) as error:
            return _failed(term, problem, error)

    async def ready(result: Any) -> Any:
        return result

    return await asyncio.gather(
        *(
            settled(term, result) if inspect.isawaitable(result) else ready(result)
            for (term, _), result in zip(calls, results, strict=True)
        )
    )


def _failed(term: Term, problem: Problem, error: BaseException) -> RewardError:
    """Return the error with the names of the function and the problem, and with the place where it was raised."""
    missing = term.function.missing_columns(problem) if isinstance(error, TypeError) else []
    text = f"missing column {missing[0]!r}" if missing else traceback.format_exception_only(error)[-1].strip()
    wrapped = RewardError(f"{term.function.label}, problem {problem.problem_id!r}: {text}")
    wrapped.__cause__ = error
    return wrapped.with_traceback(error.__traceback__)


def _checked(term: Term, problem: Problem, responses: Sequence[str], result: Any) -> Outcome:
    """Return the values of a call as grades, or the error."""
    if isinstance(result, BaseException):
        return result
    try:
        values = _as_list(result, len(responses)) if term.function.convention.returns_list else [result]
        may_skip = term.function.convention.may_skip
        return [None if value is None and may_skip else _as_grade(value) for value in values]
    except _BadValueError as error:
        place = term.function.place
        return RewardError(f"{term.function.label} returned {error}, for problem {problem.problem_id!r}{place}")


def _by_response(term: Term, outcomes: Iterator[Outcome], num_responses: int) -> list[Value | BaseException]:
    """Take the outcomes of the term's calls, and return them by response. Raises: the error of a whole group."""
    if not term.function.whole_group:
        taken = [next(outcomes) for _ in range(num_responses)]
        return [outcome if isinstance(outcome, BaseException) else outcome[0] for outcome in taken]
    outcome = next(outcomes)
    if isinstance(outcome, BaseException):
        raise outcome
    return list(outcome)


class _BadValueError(Exception):
    """A value that no reward may have; the text describes the value."""


def _as_list(result: Any, length: int) -> list[Any]:
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        raise _BadValueError(f"{_shown(result)}, not a list with one number per response")
    if len(result) != length:
        raise _BadValueError(f"a list of {len(result)} values for {length} responses")
    return list(result)


def _as_grade(value: Any) -> Grade:
    if isinstance(value, Grade):
        components = {str(name): _number(number) for name, number in value.components.items()}
        return Grade(_number(value.reward), components, value.answer)
    if isinstance(value, dict):  # verl's form: a score, and values to log
        if "score" not in value:
            raise _BadValueError(f"a dict without 'score', which has {', '.join(map(repr, value)) or 'no keys'}")
        numbers = {str(key): float(item) for key, item in value.items() if key != "score" and _is_finite(item)}
        answer = value.get("pred")
        return Grade(_number(value["score"]), numbers, answer if isinstance(answer, str) else None)
    return Grade(_number(value))


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _number(value: Any) -> float:
    scalar = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value  # NumPy, PyTorch
    if not isinstance(scalar, Real):
        raise _BadValueError(f"{_shown(value)}, not a number")
    if not math.isfinite(scalar):
        raise _BadValueError(f"{float(scalar)}, not a finite number")
    return float(scalar)


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{text[:_MAX_SHOWN]}{'…' if len(text) > _MAX_SHOWN else ''} of type {type(value).__name__}"
