"""Chain sums: add labelled numbers, writing the running total at every step.

    prompt     a3b9c4:
    solution   a3,3b9,12c4,16=16        label, number, comma, running total, ...; then `=` and the sum

Only the number after the last `=` is graded. Steps are not required, but they make the right sum more likely. The
number of terms n is Zipf-distributed, P(n) ~ n^-exponent, so response lengths have a long tail.

A hash of the text decides that a prompt is held out, about one in eight. No training problem and no demonstration has a
held-out prompt, for any seed and any distribution of lengths.
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
_HELD_OUT_ONE_IN = 8  # divides 256, so the remainder of a hash byte is unbiased
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
                f"task.options: min_terms = {min_terms} and max_terms = {max_terms} are out of range;"
                f" 2 <= min_terms <= max_terms <= {len(LABELS)} would work"
            )
        self.seed = seed
        self._lengths = range(min_terms, max_terms + 1)
        self._cumulative_weights = list(accumulate(n**-exponent for n in self._lengths))

    def problem(self, index: int) -> Problem:
        """Return the `index`-th training problem."""
        rng = random.Random(f"chain sums {self.seed} {index}")
        prompt, answer = _draw(rng, self._draw_num_terms(rng), held_out=False)
        return Problem(f"chain_sums/{self.seed}/{index}", prompt, answer, difficulty=len(prompt) // 2)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Return the first `num_problems` held-out problems, with lengths distributed as in training.

        Prompts are distinct where possible. Nearly a third of the problems have two terms, with only eight held-out
        prompts. When 64 draws in a row were not new, a prompt repeats, so that accuracy stays an average over the
        training distribution of lengths.
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
        """Return reward and accuracy 1 if the response ends with `=` and the sum, else 0.

        `shows_steps` is 1 if the response has any step. The response must not contain special tokens. A malformed
        response is wrong, never an error.
        """
        _, equals, final = response.rpartition("=")
        right = float(bool(equals) and final == problem.answer)
        return Grade(right, {"accuracy": right, "shows_steps": float("," in response)})

    def _draw_num_terms(self, rng: random.Random) -> int:
        return rng.choices(self._lengths, cum_weights=self._cumulative_weights)[0]


def is_held_out(prompt: str) -> bool:
    """True if the prompt belongs to the held-out set; depends on its text alone."""
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % _HELD_OUT_ONE_IN == 0


def num_terms(problem: Problem) -> int:
    """Number of terms to add, the same as `Problem.difficulty`."""
    return len(_terms(problem))


def solution(problem: Problem) -> str:
    """Return the right response with every step."""
    return _steps(_terms(problem), accumulate(n for _, n in _terms(problem))) + "=" + problem.answer


@dataclass(frozen=True, slots=True)
class Flaws:
    """Probabilities of the flaws of demonstrations.

    Not independent of length: a longer chain has more steps for slips and for giving up.
    """

    blurt: float = 0.55  # guess at once, without a step
    slip: float = 0.04  # per step: a wrong running total, which carries over to the next steps
    give_up: float = 0.05  # after a step: guess the answer


def demonstration(problem: Problem, rng: random.Random, flaws: Flaws = Flaws()) -> str:
    """Return the response of an able but careless solver; always ends with `=number`.

    A policy trained on demonstrations can write the steps but often does not, so reinforcement learning has a skill to
    reinforce.
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
    """Draw a prompt of the held-out or the training set; return it with its answer."""
    while True:
        digits = rng.choices(DIGITS, k=num_terms)
        prompt = "".join(map(str.__add__, LABELS, digits)) + ":"
        if is_held_out(prompt) == held_out:
            return prompt, str(sum(map(int, digits)))


def _terms(problem: Problem) -> list[tuple[str, int]]:
    """Label and number of every term."""
    text = problem.text.removesuffix(":")
    return [(label, int(number)) for label, number in zip(text[::2], text[1::2], strict=True)]


def _steps(terms: Iterable[tuple[str, int]], totals: Iterable[int]) -> str:
    """Text of the steps; ends with the shorter of `terms` and `totals`."""
    return "".join(f"{label}{number},{total}" for (label, number), total in zip(terms, totals, strict=False))


def _near_guess(problem: Problem, rng: random.Random) -> int:
    """Draw a number near the answer, with a larger error for longer chains; right one time in five for two terms."""
    return max(1, int(problem.answer) + round(rng.gauss(0, num_terms(problem))))


def _small_error(rng: random.Random, total: int) -> int:
    """Draw an error of 1 or 2 in either direction that keeps the total at 1 or more."""
    error = rng.choice((-2, -1, 1, 2))
    return error if total + error >= 1 else -error
