"""Running sums: chain sums in turns. Every turn adds some numbers and asks for the sum of all numbers so far.

    prompt     a3b9:          response   =12
    next turn  c4d2:          response   =18

A turn is right if the number after its last `=` is the sum. The first wrong turn ends the episode; the reward is the
share of right turns. Prompts are held out as in chain sums.
"""

from __future__ import annotations

import random
from itertools import accumulate

from midflight.envs.chain_sums import DIGITS, LABELS, is_held_out
from midflight.errors import RecipeError
from midflight.types import Grade, Problem


class RunningSums:
    """Implements Environment.

    Invariants: the same as ChainSums. A problem's prompt has the texts of all turns, and its answer the sum after each.
    Raises: RecipeError if an option is out of range.
    """

    def __init__(self, *, seed: int = 0, num_turns: int = 2, terms_per_turn: int = 2) -> None:
        if num_turns < 1 or not 2 <= num_turns * terms_per_turn <= len(LABELS):
            raise RecipeError(
                f"task.options: num_turns = {num_turns} times terms_per_turn = {terms_per_turn} is out of range;"
                f" 2 to {len(LABELS)} terms would work"
            )
        self.seed = seed
        self._num_turns, self._terms_per_turn = num_turns, terms_per_turn
        self._texts: list[str] = []
        self._sums: list[str] = []
        self._num_right = 0

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"running sums {self.seed} {index}")
        return self._draw(rng, f"running_sums/{self.seed}/{index}", held_out=False)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        rng = random.Random("running sums, held out")
        return [self._draw(rng, f"running_sums/held_out/{index}", held_out=True) for index in range(num_problems)]

    def reset(self, problem: Problem) -> str:
        self._texts = [f"{part}:" for part in problem.text.split(":") if part]
        self._sums = problem.answer.split(",")
        self._num_right = 0
        return self._texts[0]

    def step(self, response: str) -> str | Grade:
        _, equals, final = response.rpartition("=")
        is_right = bool(equals) and final == self._sums[self._num_right]
        self._num_right += is_right
        all_right = self._num_right == len(self._texts)
        if is_right and not all_right:
            return self._texts[self._num_right]
        return Grade(self._num_right / len(self._texts), {"accuracy": float(all_right)})

    def _draw(self, rng: random.Random, problem_id: str, held_out: bool) -> Problem:
        step = self._terms_per_turn
        while True:
            digits = rng.choices(DIGITS, k=self._num_turns * step)
            terms = list(map(str.__add__, LABELS, digits))
            turns = ["".join(terms[start : start + step]) + ":" for start in range(0, len(terms), step)]
            sums = list(accumulate(map(int, digits)))[step - 1 :: step]
            prompt = "".join(turns)
            if is_held_out(prompt) == held_out:
                return Problem(problem_id, prompt, ",".join(map(str, sums)), difficulty=len(terms))
