"""Problems and verifiers of the library reasoning-gym: any of its tasks by name, several of them by weight.

A hash of the question decides that it is held out, about one in four. Training problems never have a held-out question,
for any seed and any number of problems.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import os
import pickle
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from midflight.config.tasks import GymTask, ReasoningGymSource
from midflight.envs.mixture import apportioned
from midflight.envs.one_turn import grade_alone
from midflight.envs.patterns import compiled, last_answer
from midflight.envs.rewards.terms import Rewards
from midflight.errors import MissingExtraError, RecipeError
from midflight.types import Grade, Problem

_HELD_OUT_ONE_IN = 4  # divides 256, so the remainder of a hash byte is unbiased
_CHUNK = 512  # entries of one dataset object; the next entries have another seed
_TRIES_AT_ONCE = 8  # entries of a chunk for each training problem, for questions that are held out
_MAX_TRIES = 64
_MAX_HELD_OUT_TRIES = 64  # entries for each held-out problem
_MAX_DATASETS = 64  # objects that are kept
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OWN_OPTIONS = ("seed", "size")
# Their questions come in the order of a set of strings.
_NEED_HASH_SEED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")


class ReasoningGymTask:
    """Implements GradedTask.

    `problem(index)` depends on the options, the seed and `index` only. The category of a problem is the task's name.
    The reward is the verifier's score, plus the sum of `rewards`.
    Raises: RecipeError if a task, an option or a pattern is wrong; MissingExtraError without the library.
    """

    def __init__(self, source: ReasoningGymSource, *, rewards: Rewards, seed: int = 0, key: str = "task") -> None:
        """Check the tasks and their options. `key` is the recipe's key of the source, for messages."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise MissingExtraError("reasoning-gym", "reasoning-gym")
        if source.prompt_template is not None and "{question}" not in source.prompt_template:
            raise RecipeError(f'{key}.prompt_template has no place for the question; add "{{question}}" to it')
        self._source, self._rewards, self._seed, self._key = source, rewards, seed, key
        self._pattern = _ANSWER
        if source.answer_pattern is not None:
            key_of_pattern = f"{key}.answer_pattern"
            self._pattern = compiled(key_of_pattern, source.answer_pattern, re.DOTALL, group_holds="the answer")
        self._weights = [task.weight for task in source.tasks]
        for index, task in enumerate(source.tasks):
            _check(task, f"{key}.tasks.{index}")
        self._dataset = functools.lru_cache(maxsize=_MAX_DATASETS)(self._created)
        for index in range(len(source.tasks)):
            self._dataset(index, "scores", 0)
        self._rewards_are_checked = False

    @property
    def wants_groups(self) -> bool:
        return self._rewards.wants_groups

    def problem(self, index: int) -> Problem:
        """Return the `index`-th training problem. Raises: RecipeError if a task has almost no different questions."""
        rng = random.Random(f"reasoning-gym {self._seed} {index}")
        task = rng.choices(range(len(self._weights)), self._weights)[0]
        per_chunk = _CHUNK // _TRIES_AT_ONCE
        for attempt in range(_MAX_TRIES):
            round_, offset = divmod(attempt, _TRIES_AT_ONCE)
            chunk = f"{self._seed} {round_} {index // per_chunk}"
            entry = self._entry(task, chunk, index % per_chunk * _TRIES_AT_ONCE + offset)
            if not is_held_out(entry["question"]):
                problem = self._problem(task, f"{self._seed}/{index}", entry)
                self._check_rewards(problem)
                return problem
        name = self._source.tasks[task].name
        raise RecipeError(
            f"{self._key}.tasks.{task}: {_MAX_TRIES} questions of {name} in a row are held out; other options would"
            " give more different questions"
        )

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Return held-out problems of every task in proportion to the weights, the same ones for every seed.

        Questions are distinct; a task with few different questions returns fewer.
        """
        counts = apportioned(self._weights, num_problems)
        return [problem for task, count in enumerate(counts) for problem in self._held_out(task, count)]

    def grade(self, problem: Problem, response: str) -> Grade:
        return grade_alone(self, problem, response)

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade | BaseException]:
        """Return the verifier's score of each response, plus the sum of the further rewards.

        Components: `score`, `accuracy` (1 for the full score), and `verifier_error` (1 if the verifier raised, which
        counts as a wrong answer: some verifiers raise for an answer of another form).
        """
        further = self._rewards.grade_group(problem, responses)
        return [
            other if isinstance(other, BaseException) else self._verified(problem, response, other)
            for response, other in zip(responses, further, strict=True)
        ]

    def _verified(self, problem: Problem, response: str, other: Grade) -> Grade:
        answer = self._answer(response)
        dataset = self._dataset(problem.columns["task"], "scores", 0)
        score, failed = 0.0, False
        if answer:
            try:
                score = float(dataset.score_answer(answer, pickle.loads(problem.columns["entry"])))
            except Exception:
                failed = True
        components = {"score": score, "accuracy": float(score >= 1), "verifier_error": float(failed)}
        return Grade(score + other.reward, components | other.components, answer=answer)

    def _answer(self, response: str) -> str:
        """Last match of the pattern; without a pattern in the recipe, the whole response if there is no match."""
        answer = last_answer(self._pattern, response)
        if answer is None:
            answer = response if self._source.answer_pattern is None else ""
        return answer.strip()

    def _held_out(self, task: int, count: int) -> Iterator[Problem]:
        seen: set[str] = set()
        for index in range(_MAX_HELD_OUT_TRIES * count):
            if len(seen) == count:
                return
            entry = self._entry(task, f"held out {index // _CHUNK}", index % _CHUNK)
            question = entry["question"]
            if is_held_out(question) and question not in seen:
                seen.add(question)
                yield self._problem(task, f"held_out/{len(seen) - 1}", entry)

    def _problem(self, task: int, place: str, entry: dict[str, Any]) -> Problem:
        name, question = self._source.tasks[task].name, entry["question"]
        template = self._source.prompt_template
        prompt = question if template is None else template.replace("{question}", question)
        return Problem(
            f"{name}/{place}",
            [{"role": "user", "content": prompt}] if self._source.chat else prompt,
            str(entry["answer"] or ""),
            _difficulty(entry["metadata"]),
            category=name,
            # The grading process does not generate the entry again: this takes a second for some tasks. Entries hold
            # any Python objects, so they are bytes in streams.
            columns={"task": task, "entry": pickle.dumps(entry)},
        )

    def _entry(self, task: int, chunk: str, index: int) -> dict[str, Any]:
        """Return an entry, a pure function of the arguments: some tasks use the global random numbers."""
        dataset = self._dataset(task, chunk, self._seed_of(task, chunk))
        state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(f"{task} {chunk} {index}")
        try:
            return dict(dataset[index])
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)

    def _seed_of(self, task: int, chunk: str) -> int:
        """Seed of a chunk, in 31 bits, because the library adds indices and NumPy takes 32 bits."""
        text = f"{task} {self._source.tasks[task].name} {chunk}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1

    def _created(self, task: int, chunk: str, seed: int) -> Any:
        """Return a dataset object of the library. Raises: RecipeError if it refuses the values of the options."""
        import reasoning_gym

        section = self._source.tasks[task]
        try:
            return reasoning_gym.create_dataset(section.name, **section.options, seed=seed, size=_CHUNK)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RecipeError(f"{self._key}.tasks.{task}: {section.name} refuses its options: {reason}") from error

    def _check_rewards(self, problem: Problem) -> None:
        if not self._rewards_are_checked:
            self._rewards.check(problem)
            self._rewards_are_checked = True


def is_held_out(question: str) -> bool:
    """True if the question belongs to the held-out set; depends on its text alone."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % _HELD_OUT_ONE_IN == 0


def _check(task: GymTask, key: str) -> None:
    """Check the names of a task and its options. Raises: RecipeError."""
    from reasoning_gym.factory import DATASETS

    names = sorted(DATASETS.keys() - {"composite"})
    if task.name not in names:
        raise RecipeError(f"{key}.name: reasoning-gym has no task {task.name!r}{_close(task.name, names)}")
    if task.name in _NEED_HASH_SEED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise RecipeError(
            f"{key}.name: the questions of {task.name} depend on Python's hash seed, so a resumed run would get others;"
            " start midflight with the environment variable PYTHONHASHSEED=0"
        )
    options = [field.name for field in dataclasses.fields(DATASETS[task.name][1])]
    for option in task.options:
        if option in _OWN_OPTIONS:
            raise RecipeError(f"{key}.options: {option} is chosen by midflight; leave it out (run.seed is the seed)")
        if option not in options:
            known = [name for name in options if name not in _OWN_OPTIONS]
            raise RecipeError(f"{key}.options: {task.name} has no option {option!r}{_close(option, known)}")


def _close(name: str, names: Sequence[str]) -> str:
    """Close matches of a name as the end of a sentence; all names if there are none and they are few."""
    close = difflib.get_close_matches(name, names, n=3) or (names if len(names) <= 20 else [])
    return f"; there is {', '.join(close)}" if close else "; see `reasoning_gym.factory.DATASETS` for all names"


def _difficulty(metadata: dict[str, Any]) -> int:
    """Difficulty in an entry's metadata if it is one number, else 0; most tasks have the range of their options."""
    difficulty = metadata.get("difficulty")
    if isinstance(difficulty, dict) and len(difficulty) == 1:
        (difficulty,) = difficulty.values()
    return round(difficulty) if isinstance(difficulty, int | float) else 0
