"""Evaluations over fakes: responses in flight, refusals, failures, figures and their JSON form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from midflight.actor.shares import FIRST_EVALUATION_ID
from midflight.errors import RequestError
from midflight.evals.answering import Answering, Evaluator, QuestionSet
from midflight.evals.evaluate import Evaluation, EvaluationPlan, evaluate
from midflight.models.prompts import PromptFormat
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.types import GenerationRequest, Grade, Problem, SamplingParams

SAMPLING = SamplingParams(max_tokens=8)


class Answers(CountingEnvironment):
    """Environment that grades problem i by `grades[i]`; a missing grade raises."""

    grades: dict[int, Grade]

    def grade(self, problem: Problem, response: str) -> Grade:
        return self.grades[int(problem.problem_id)]


class PickyGenerator(ScriptedGenerator):
    """Generator that refuses prompts of one token, and counts the requests in flight."""

    most_in_flight = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        if any(len(request.prompt_token_ids) == 1 for request in requests):
            raise RequestError("too short")
        super().add(requests)
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)


def problems(num_problems: int, **fields: Any) -> list[Problem]:
    return [replace(Problem(str(index), prompt=str(10 + index)), **fields) for index in range(num_problems)]


def evaluator(
    environment: CountingEnvironment, generator: ScriptedGenerator | None = None, num_in_flight: int = 16
) -> Evaluator:
    generator = generator or ScriptedGenerator(lambda _: 3)
    return Evaluator(
        generator, environment, ImmediateGrader(environment), PromptFormat(DigitTokenizer()), 0, num_in_flight
    )


def held_out(num_problems: int) -> EvaluationPlan:
    questions = QuestionSet("held_out", problems(num_problems), SAMPLING)
    return EvaluationPlan((questions,), questions, hard_from=5)


def test_evaluation_counts_the_problems_it_got() -> None:
    evaluation = evaluate(evaluator(CountingEnvironment()), held_out(3))
    assert (evaluation.num_problems, evaluation.sampled_accuracy, evaluation.mean_length) == (3, 1.0, 3.0)


def test_accuracy_without_problems_is_none() -> None:
    values = evaluate(evaluator(CountingEnvironment()), held_out(0)).to_json()
    figures = ("sampled_accuracy", "greedy_accuracy", "sampled_accuracy_hard", "mean_length")
    assert [values[name] for name in figures] == [None] * 4
    assert (values["num_problems"], values["num_hard_problems"]) == (0, 0)
    assert values["sets"]["held_out"] | {"by_difficulty": {}} == values["sets"]["held_out"]
    assert values["sets"]["held_out"]["avg"] is None


@pytest.mark.parametrize("num_in_flight", [1, 3, 100])
def test_responses_in_flight_are_limited(num_in_flight: int) -> None:
    generator = PickyGenerator(lambda rollout: 1 + rollout % 5)
    questions = QuestionSet("some", problems(7), SAMPLING, samples=3)
    result = evaluate(evaluator(CountingEnvironment(), generator, num_in_flight), EvaluationPlan((questions,), None, 5))
    assert result.sets["some"].num_problems == 7
    assert generator.most_in_flight == min(num_in_flight, 21)


def test_every_sample_has_an_id_of_its_own_and_every_set_a_range() -> None:
    seen: list[int] = []

    class Recorder(ScriptedGenerator):
        def add(self, requests: Sequence[GenerationRequest]) -> None:
            seen.extend(request.rollout_id for request in requests)
            super().add(requests)

    sets = (QuestionSet("a", problems(2), SAMPLING, samples=2), QuestionSet("b", problems(2), SAMPLING))
    evaluate(evaluator(CountingEnvironment(), Recorder(lambda _: 1)), EvaluationPlan(sets, None, 5))
    second = FIRST_EVALUATION_ID + (1 << 32)
    assert seen == [*range(FIRST_EVALUATION_ID, FIRST_EVALUATION_ID + 4), second, second + 1]


def test_refused_prompts_are_ungraded_and_wrong() -> None:
    short = [Problem("7", prompt="7"), *problems(1)]
    questions = QuestionSet("some", short, SAMPLING, samples=2)
    environment = CountingEnvironment()
    result = evaluate(
        evaluator(environment, PickyGenerator(lambda _: 2), num_in_flight=1), EvaluationPlan((questions,), None, 5)
    ).sets["some"]
    assert result.figures
    assert (result.num_ungraded, result.figures.avg.value, result.figures.pass_at["2"].value) == (2, 0.5, 0.5)


def graded(grades: dict[int, Grade], correct_component: str | None = None) -> Evaluation:
    environment = Answers()
    environment.grades = grades
    questions = QuestionSet("some", problems(len(grades)), SAMPLING, correct_component=correct_component)
    return evaluate(evaluator(environment), EvaluationPlan((questions,), None, 5))


@pytest.mark.parametrize(
    ("grade", "is_right"),
    [
        (Grade(1.0), True),
        (Grade(0.9), False),
        (Grade(0.2, {"accuracy": 1.0}), True),
        (Grade(2.0, {"accuracy": 0.0, "math": 1.0}), False),
        (Grade(0.8, {"math": 1.0, "brevity": -0.2}), True),
        (Grade(1.2, {"math": 0.0, "bonus": 1.2}), False),
    ],
)
def test_right_is_accuracy_else_the_first_term_else_the_reward(grade: Grade, is_right: bool) -> None:
    figures = graded({0: grade}, correct_component="math").sets["some"].figures
    assert figures
    assert (figures.avg.value, figures.pass_at["1"].value) == (grade.reward, float(is_right))


def test_ungraded_responses_are_counted() -> None:
    environment = Answers()
    environment.grades = {0: Grade(1.0)}
    plan = EvaluationPlan((QuestionSet("some", problems(2), SAMPLING),), None, 5)
    result = evaluate(evaluator(environment), plan).sets["some"]
    assert result.figures
    assert (result.num_ungraded, result.figures.avg.value) == (1, 0.5)


def test_majority_votes_over_answers_of_grades() -> None:
    result = graded({0: Grade(1.0, answer="4"), 1: Grade(0.0)}).sets["some"].figures
    assert result
    assert result.maj
    assert result.maj.value == 0.5


def test_figures_by_difficulty_and_category() -> None:
    environment = CountingEnvironment(lambda index: float(index < 2))
    easy = problems(2, difficulty=2, category="algebra")
    hard = [replace(problem, problem_id="5") for problem in problems(1, difficulty=7, category="geometry")]
    questions = QuestionSet("some", [*easy, *hard], SAMPLING)
    values = evaluate(evaluator(environment), EvaluationPlan((questions,), None, 5)).to_json()["sets"]["some"]
    assert {name: part["avg"]["value"] for name, part in values["by_difficulty"].items()} == {"2": 1.0, "5-8": 0.0}
    assert {name: part["num_problems"] for name, part in values["by_category"].items()} == {"algebra": 2, "geometry": 1}
    assert values["avg"]["value"] == pytest.approx(2 / 3)
    assert values["avg"]["standard_error"] == pytest.approx(math.sqrt(1 / 3 / 3))


class Grouped(CountingEnvironment):
    """Environment that rewards every response with the number of responses to its problem."""

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade]:
        return [Grade(float(len(responses))) for _ in responses]


@pytest.mark.parametrize("num_in_flight", [1, 5])
def test_all_samples_of_a_problem_are_one_group(num_in_flight: int) -> None:
    generator = PickyGenerator(lambda rollout: 1 + rollout % 3)
    questions = QuestionSet("some", [Problem("1", prompt="1"), *problems(3)], SAMPLING, samples=4)
    result = evaluate(evaluator(Grouped(), generator, num_in_flight), EvaluationPlan((questions,), None, 5)).sets[
        "some"
    ]
    assert result.figures
    assert (result.num_ungraded, result.figures.avg.value) == (4, 3.0)


def test_stopping_leaves_no_table_and_nothing_in_flight() -> None:
    generator = ScriptedGenerator(lambda _: 5)
    answering = Answering(evaluator(CountingEnvironment(), generator), [QuestionSet("some", problems(4), SAMPLING)])
    answering.step()
    answering.step()
    answering.stop()
    assert (generator.num_in_flight, answering.tables, answering.is_done) == (0, [], True)
    assert answering.num_generated == 4 * 2
