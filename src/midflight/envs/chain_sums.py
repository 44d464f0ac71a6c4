"""Chain sums: add labelled numbers, writing the running total at every step.

    prompt     a3b9c4:
    solution   a3,3b9,12c4,16=16        label, number, comma, running total, ...; then `=` and the sum

Only the number after the last `=` is graded. Writing the steps is a habit that pays, not one that is asked for.
The number of terms n is Zipf-distributed, P(n) ~ n^-exponent, so that response lengths have a long tail.

A prompt is held out if a hash of its text says so, about one in eight: whatever the seed and whatever the length
distribution, no training problem and no demonstration ever has a held-out prompt.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from midflight.errors import RecipeError
from midflight.types import Grade, Problem

LABELS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "123456789"
_HELD_OUT_ONE_IN = 8  # divides 256, so that a hash byte is unbiased
_MAX_REDRAWS = 64


class ChainSums:
    """The chain-sum environment.

    Invariants: `problem(index)` depends on the options and `index` only, in any order of calls; its prompt is never
    held out. `held_out_problems` does not depend on `seed`.
    Raises: RecipeError if an option is out of range.
    """

    def __init__(self, *, seed: int = 0, min_terms: int = 2, max_terms: int = 24, exponent: float = 1.6) -> None:
        if not 2 <= min_terms <= max_terms <= len(LABELS):
            raise RecipeError(
                f"task.options: min_terms = {min_terms} and max_terms = {max_terms} do not fit;"
                f" 2 <= min_terms <= max_terms <= {len(LABELS)} would work"
            )
        self.seed = seed
        self._lengths = range(min_terms, max_terms + 1)
        self._cumulative_weights = list(accumulate(n**-exponent for n in self._lengths))

    def problem(self, index: int) -> Problem:
        """The `index`-th training problem."""
        rng = random.Random(f"chain sums {self.seed} {index}")
        prompt, answer = _draw(rng, self._draw_num_terms(rng), held_out=False)
        return Problem(f"chain_sums/{self.seed}/{index}", prompt, answer, difficulty=len(prompt) // 2)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """The first `num_problems` held-out problems, with the lengths distributed as in training.

        Prompts are distinct as far as they can be. Two terms have only eight held-out prompts and nearly a third
        of the problems: once those prompts have all been used (in practice: 64 draws in a row were not new), they
        repeat, so that accuracy stays an average over the length distribution that is trained on.
        """
        rng = random.Random("chain sums, held out")
        seen: set[str] = set()
        problems = []
        for index in range(num_problems):
            num_terms = self._draw_num_terms(rng)
            for _ in range(_MAX_REDRAWS):
                prompt, answer = _draw(rng, num_terms, held_out=True)
                if prompt not in seen:
                    break
            seen.add(prompt)
            problems.append(Problem(f"chain_sums/held_out/{index}", prompt, answer, difficulty=len(prompt) // 2))
        return problems

    def grade(self, problem: Problem, response: str) -> Grade:
        """Reward 1 if the response ends with `=` and the sum, else 0, which is also its accuracy.

        `shows_steps` tells whether it wrote any step.

        The response comes without special tokens. A malformed one is wrong, never an error.
        """
        _, equals, final = response.rpartition("=")
        right = float(bool(equals) and final == problem.answer)
        return Grade(right, {"accuracy": right, "shows_steps": float("," in response)})

    def _draw_num_terms(self, rng: random.Random) -> int:
        return rng.choices(self._lengths, cum_weights=self._cumulative_weights)[0]


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out set; a function of its text alone."""
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % _HELD_OUT_ONE_IN == 0


def num_terms(problem: Problem) -> int:
    """How many numbers are to be added: `Problem.difficulty`."""
    return len(_terms(problem))


def solution(problem: Problem) -> str:
    """The right response with every step written out."""
    return _steps(_terms(problem), accumulate(n for _, n in _terms(problem))) + "=" + problem.answer


@dataclass(frozen=True, slots=True)
class Flaws:
    """How demonstrations go wrong; probabilities.

    Not: independent of length. A longer chain has more steps to slip in and more chances to give up.
    """

    blurt: float = 0.55  # guess at once, without a step
    slip: float = 0.04  # per step: the running total is off, and the error is carried on
    give_up: float = 0.05  # after a step: guess the rest


def demonstration(problem: Problem, rng: random.Random, flaws: Flaws = Flaws()) -> str:
    """A response of somebody who knows how to do it and often does not bother; always ends with `=number`.

    A policy taught on these has the skill and not the habit: reinforcement learning can find the one with the other.
    """
    if rng.random() < flaws.blurt:
        return f"={_near_guess(problem, rng)}"
    total, totals = 0, []
    terms = _terms(problem)
    for _, number in terms:
        slipped = rng.random() < flaws.slip
        total += number + (_small_error(rng, number + total) if slipped else 0)
        totals.append(total)
        if len(totals) < len(terms) and rng.random() < flaws.give_up:
            return _steps(terms, totals) + f"={_near_guess(problem, rng)}"
    return _steps(terms, totals) + f"={total}"


def _draw(rng: random.Random, num_terms: int, held_out: bool) -> tuple[str, str]:
    """A prompt on the wanted side of the split, and its answer."""
    while True:
        digits = rng.choices(DIGITS, k=num_terms)
        prompt = "".join(map(str.__add__, LABELS, digits)) + ":"
        if is_held_out(prompt) == held_out:
            return prompt, str(sum(map(int, digits)))


def _terms(problem: Problem) -> list[tuple[str, int]]:
    """Label and number of every term."""
    text = problem.prompt.removesuffix(":")
    return [(label, int(number)) for label, number in zip(text[::2], text[1::2], strict=True)]


def _steps(terms: Iterable[tuple[str, int]], totals: Iterable[int]) -> str:
    """The steps up to the shorter of the two."""
    return "".join(f"{label}{number},{total}" for (label, number), total in zip(terms, totals, strict=False))


def _near_guess(problem: Problem, rng: random.Random) -> int:
    """A number near the answer, further off for longer chains; right by luck one time in five for two terms."""
    return max(1, int(problem.answer) + round(rng.gauss(0, num_terms(problem))))


def _small_error(rng: random.Random, total: int) -> int:
    """What to add to a total to be wrong: 1 or 2 up or down, and never below 1."""
    error = rng.choice((-2, -1, 1, 2))
    return error if total + error >= 1 else -error
