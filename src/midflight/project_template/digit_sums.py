"""A task to learn: problems to train on, other problems to test with, and a grade for each response."""

import random

from midflight.types import Grade, Problem


class DigitSums:
    """Sum of the digits of a number; the response to 394, written as `a3b9c4:`, must end with `=16`."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def problem(self, index: int) -> Problem:
        """Return the training problem of this index, always the same one."""
        return self._draw(random.Random(f"{self.seed} {index}"), f"train/{index}", held_out=False)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Return problems to measure accuracy with, none of which is ever trained on."""
        rng = random.Random("held out")
        return [self._draw(rng, f"test/{index}", held_out=True) for index in range(num_problems)]

    def grade(self, problem: Problem, response: str) -> Grade:
        """Return the reward; the names in the dictionary appear in the metrics as well."""
        right = float(response.rpartition("=")[2] == problem.answer)
        return Grade(right, {"accuracy": right, "shows_steps": float("," in response)})

    def _draw(self, rng: random.Random, problem_id: str, held_out: bool) -> Problem:
        """Draw numbers until one is on the wanted side: those that divide by 8 are held out."""
        number = ""
        while not number or (int(number) % 8 == 0) != held_out:
            number = "".join(rng.choices("123456789", k=rng.randint(2, 6)))
        prompt = "".join(map(str.__add__, "abcdef", number)) + ":"
        return Problem(problem_id, prompt, str(sum(map(int, number))), difficulty=len(number))
