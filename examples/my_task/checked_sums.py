"""A task with partial credit: half of the reward for the right sum, half for right steps.

prompt     a3b9c4:
response   a3,3b9,12c4,15=15        two steps of three are right, the sum is not: reward 1/3
"""

from __future__ import annotations

import random
import re
from itertools import accumulate, zip_longest
from string import ascii_lowercase

from midflight.errors import RecipeError
from midflight.types import Grade, Problem

_STEP = re.compile(r"[a-z]\d,(\d+)")  # letter, number, comma, running total


class CheckedSums:
    """Problems with digits to add, each after a letter.

    Raises: RecipeError if num_terms is out of range.
    """

    def __init__(self, *, seed: int = 0, num_terms: int = 5) -> None:
        if not 3 <= num_terms <= len(ascii_lowercase):
            raise RecipeError(f"task.options: num_terms = {num_terms} is not in 3 to 26")
        self.seed = seed
        self.num_terms = num_terms

    def problem(self, index: int) -> Problem:
        return self._draw(random.Random(f"{self.seed} {index}"), f"train/{index}", held_out=False)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        rng = random.Random("held out")
        return [self._draw(rng, f"held_out/{index}", held_out=True) for index in range(num_problems)]

    def grade(self, problem: Problem, response: str) -> Grade:
        """Return the reward; `accuracy` says that it is right, and `steps` is the share of right steps."""
        written, _, total = response.rpartition("=")
        expected = list(accumulate(map(int, problem.text[1::2])))
        right = [int(step) == sum_ for step, sum_ in zip_longest(_STEP.findall(written), expected, fillvalue=-1)]
        accuracy, steps = float(total == problem.answer), sum(right) / len(right)
        return Grade((accuracy + steps) / 2, {"accuracy": accuracy, "steps": steps})

    def _draw(self, rng: random.Random, problem_id: str, held_out: bool) -> Problem:
        """Draw digits from one side of the split: multiples of 8 are held out."""
        while True:
            digits = rng.choices("123456789", k=self.num_terms)
            if (int("".join(digits)) % 8 == 0) == held_out:
                break
        prompt = "".join(map(str.__add__, ascii_lowercase, digits))
        return Problem(problem_id, f"{prompt}:", str(sum(map(int, digits))), difficulty=self.num_terms)
