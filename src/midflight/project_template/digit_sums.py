"""A task to learn: problems to train on, other problems to test with, and a grade for each response."""

import random

from midflight.types import Grade, Problem


class DigitSums:
    """Sum of the digits of a number; the response to 394, written as `a3b9c4:`, must end with `=16`."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def problem(self, index: int) -> Problem:
        """Return the training problem of this index, always the same one."""
        rng = random.Random(f"{self.seed} {index}")
        return self._make(f"train/{index}", 8 * rng.randrange(2, 1250) + rng.randrange(1, 8))

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Return problems to measure accuracy on. Their numbers divide by 8, so none is ever trained on."""
        return [self._make(f"test/{index}", 8 * (index % 1248 + 2)) for index in range(num_problems)]

    def grade(self, problem: Problem, response: str) -> Grade:
        """Return the reward; the names in the dictionary appear in the metrics as well."""
        right = float(response.rpartition("=")[2] == problem.answer)
        return Grade(right, {"accuracy": right, "shows_steps": float("," in response)})

    def _make(self, problem_id: str, number: int) -> Problem:
        prompt = "".join(label + digit for label, digit in zip("abcd", str(number), strict=False))
        return Problem(problem_id, f"{prompt}:", str(sum(map(int, str(number)))), difficulty=len(str(number)))
