"""Evaluations with few or no held-out problems."""

from __future__ import annotations

from dataclasses import asdict

from midflight.evals.evaluate import Evaluation, Evaluator, evaluate
from midflight.models.prompts import PromptFormat
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.types import Problem, SamplingParams


class Few(CountingEnvironment):
    """Environment with at most `num_held_out` held-out problems."""

    num_held_out = 0

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return super().held_out_problems(min(num_problems, self.num_held_out))


def evaluation_of(num_held_out: int) -> Evaluation:
    environment = Few()
    environment.num_held_out = num_held_out
    generator = ScriptedGenerator(lambda _: 3)
    evaluator = Evaluator(generator, environment, ImmediateGrader(environment), PromptFormat(DigitTokenizer()), seed=0)
    return evaluate(evaluator, SamplingParams(max_tokens=8), num_problems=512, hard_from=5)


def test_evaluation_counts_the_problems_it_got() -> None:
    evaluation = evaluation_of(3)
    assert (evaluation.num_problems, evaluation.sampled_accuracy, evaluation.mean_length) == (3, 1.0, 3.0)


def test_accuracy_without_problems_is_none() -> None:
    evaluation = evaluation_of(0)
    figures = ("sampled_accuracy", "greedy_accuracy", "sampled_accuracy_hard", "mean_length")
    assert [asdict(evaluation)[name] for name in figures] == [None] * 4
    assert (evaluation.num_problems, evaluation.num_hard_problems) == (0, 0)
