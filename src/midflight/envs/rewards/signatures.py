"""Calling conventions of reward functions, told apart by the names of parameters.

    reward(problem, response)                                        -> number or Grade
    reward(problem, responses)                                       -> list of them, one per response of the group
    reward(prompts, completions, **columns)                          -> list of numbers or None, as in TRL
    reward(data_source, solution_str, ground_truth, extra_info)      -> number, or dict with "score", as in verl

Each may be `async`. Arguments are passed by name, and only names that the function has a parameter for. In TRL's
convention, a list has one element: the function is called once per response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from midflight.errors import RecipeError
from midflight.types import Problem

_ANSWER_NAMES = ("answer", "ground_truth", "solution")  # columns that are the right answer, unless the row has its own
_NEEDS_TOKENS = "completion_ids"
_GIVEN_BY_TRL_ONLY = ("trainer_state", "log_extra", "log_metric", "environments")


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to call a reward function."""

    shown: str
    needs: frozenset[str]  # parameters by which the convention is recognized
    arguments: Callable[[Problem, Sequence[str]], dict[str, Any]]
    returns_list: bool = False
    whole_group: bool = False
    may_skip: bool = False  # None in the list means that the reward does not apply to this response


def _plain(problem: Problem, responses: Sequence[str]) -> dict[str, Any]:
    (response,) = responses
    return {"problem": problem, "response": response}


def _group(problem: Problem, responses: Sequence[str]) -> dict[str, Any]:
    return {"problem": problem, "responses": list(responses)}


def _trl(problem: Problem, responses: Sequence[str]) -> dict[str, Any]:
    is_chat = isinstance(problem.prompt, list)
    row = dict.fromkeys(_ANSWER_NAMES, problem.answer) | problem.columns
    return {name: [value] for name, value in row.items()} | {
        "prompts": [problem.prompt] * len(responses),
        "completions": [[{"role": "assistant", "content": text}] if is_chat else text for text in responses],
    }


def _verl(problem: Problem, responses: Sequence[str]) -> dict[str, Any]:
    (response,) = responses
    columns = problem.columns
    return {
        "data_source": columns.get("data_source", problem.source),
        "solution_str": response,
        "ground_truth": problem.answer,
        "extra_info": columns.get("extra_info", columns),
    }


CONVENTIONS = (
    Convention("reward(problem, response)", frozenset({"problem", "response"}), _plain),
    Convention(
        "reward(problem, responses)", frozenset({"problem", "responses"}), _group, returns_list=True, whole_group=True
    ),
    Convention("reward(completions, **columns)", frozenset({"completions"}), _trl, returns_list=True, may_skip=True),
    Convention("reward(data_source, solution_str, ground_truth, extra_info)", frozenset({"solution_str"}), _verl),
)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function bound to its options, in one of the conventions.

    `label` names it in messages: its built-in name or its import path.
    """

    label: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    convention: Convention

    @property
    def whole_group(self) -> bool:
        return self.convention.whole_group

    def __call__(self, problem: Problem, responses: Sequence[str]) -> Any:
        """Return the function's own result, which may be an awaitable; `responses` has one, unless `whole_group`."""
        arguments = self.convention.arguments(problem, responses)
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._parameters}
        return self.function(**arguments | dict(self.options))

    @cached_property
    def place(self) -> str:
        """Place of the definition as " (file:line)", or "" for a built-in function."""
        function = inspect.unwrap(self.function)
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        if code is None or ":" not in self.label:
            return ""
        path, here = Path(code.co_filename), Path.cwd()
        return f" ({path.relative_to(here) if path.is_relative_to(here) else path}:{code.co_firstlineno})"

    def missing_columns(self, problem: Problem) -> list[str]:
        """Names of parameters without a default that the problem has no value for."""
        given = self.convention.arguments(problem, [""]).keys() | self.options.keys()
        return [
            name
            for name, item in self._parameters.items()
            if name not in given and item.default is item.empty and item.kind not in _VARIADIC
        ]

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @cached_property
    def _takes_all(self) -> bool:
        return any(item.kind is item.VAR_KEYWORD for item in self._parameters.values())


def reward_function(label: str, target: Callable[..., Any], options: Mapping[str, Any]) -> RewardFunction:
    """Return the function bound to its options; a class or a function that makes the reward is called with them.

    Raises: RecipeError if no convention fits, or an option is unknown or missing; any error of the user's constructor.
    """
    convention = _convention_of(target)
    if convention is None:
        _bind(label, target, (), options)
        made = target(**options)
        convention = _convention_of(made) if callable(made) else None
        if convention is None:
            raise RecipeError(f"{_described(label, made)}; {_ADVICE}")
        target, options = made, {}
    function = RewardFunction(label, target, options, convention)
    _check(function)
    return function


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ADVICE = f"these would work: {', '.join(item.shown for item in CONVENTIONS)}, or a class that makes such a function"


def _convention_of(target: Callable[..., Any]) -> Convention | None:
    if isinstance(target, type):
        return None
    try:
        names = set(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    if _NEEDS_TOKENS in names and "completions" not in names:
        names.add("completions")
    return next((item for item in CONVENTIONS if item.needs <= names), None)


def _check(function: RewardFunction) -> None:
    """Check the parameters of a function, except columns of rows. Raises: RecipeError."""
    convention, options = function.convention, function.options
    signature = inspect.signature(function.function)
    for name in (_NEEDS_TOKENS, *_GIVEN_BY_TRL_ONLY):
        item = signature.parameters.get(name)
        if convention.arguments is _trl and item and item.default is item.empty and item.kind not in _VARIADIC:
            advice = "; for lengths in tokens, use reward.overlong_buffer" if name == _NEEDS_TOKENS else ""
            raise RecipeError(f"task.rewards: {function.label} needs {name}, which rewards do not get{advice}")
    given = convention.arguments(Problem("", ""), [""]).keys()
    if reserved := sorted(options.keys() & given):
        raise RecipeError(f"task.rewards: {function.label}: options must not have {reserved[0]}, which is an argument")
    if convention.arguments is _trl:  # the columns of a row may be any
        _bind(function.label, function.function, (), options, partial=True)
    else:
        accepted = given if function._takes_all else given & signature.parameters.keys()
        _bind(function.label, function.function, accepted, options)


def _bind(
    label: str,
    target: Callable[..., Any],
    given: Iterable[str],
    options: Mapping[str, Any],
    *,
    partial: bool = False,
) -> None:
    signature = inspect.signature(target)
    try:
        (signature.bind_partial if partial else signature.bind)(**dict.fromkeys(given) | dict(options))
    except TypeError as error:
        bound = f" with options {dict(options)}" if options else ""
        raise RecipeError(f"{_described(label, target)}{bound}: {error}; {_ADVICE}") from error


def _described(label: str, target: object) -> str:
    try:
        return f"task.rewards: {label}{inspect.signature(target)}"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"task.rewards: {label} makes an object of type {type(target).__name__}"
