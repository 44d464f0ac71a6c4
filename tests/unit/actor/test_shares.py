"""A generator and a grader with two users."""

from __future__ import annotations

import numpy as np

from midflight.actor.shares import FIRST_EVALUATION_ID, Shares
from midflight.testing.fakes import CountingEnvironment, ImmediateGrader, ScriptedGenerator
from midflight.types import GenerationRequest, Problem, RolloutId, SamplingParams

TRAINING = [RolloutId(0), RolloutId(FIRST_EVALUATION_ID - 1)]
EVALUATION = [FIRST_EVALUATION_ID, RolloutId(FIRST_EVALUATION_ID + 9)]


def requests(ids: list[RolloutId]) -> list[GenerationRequest]:
    return [GenerationRequest(rollout, np.ones(1, np.int32), SamplingParams(max_tokens=4), seed=0) for rollout in ids]


def test_each_user_gets_its_own_completions() -> None:
    shares = Shares(ScriptedGenerator(lambda _: 2), ImmediateGrader(CountingEnvironment()))
    shares.generator.add(requests(TRAINING))
    shares.evaluation_generator.add(requests(EVALUATION))
    assert shares.generator.num_in_flight == 4
    assert (shares.generator.step(), shares.evaluation_generator.step()) == ([], [])
    assert [item.rollout_id for item in shares.generator.step()] == TRAINING
    assert [item.rollout_id for item in shares.evaluation_generator.step()] == EVALUATION
    assert shares.evaluation_generator.step() == []


def test_only_training_makes_the_engines_step() -> None:
    shares = Shares(ScriptedGenerator(lambda _: 1), ImmediateGrader(CountingEnvironment()))
    shares.evaluation_generator.add(requests(EVALUATION))
    assert shares.evaluation_generator.step() == []
    assert len(shares.evaluation_generator.generated(EVALUATION[0])) == 0


def test_each_user_gets_its_own_grades() -> None:
    shares = Shares(ScriptedGenerator(lambda _: 1), ImmediateGrader(CountingEnvironment()))
    for grader, ids in ((shares.grader, TRAINING), (shares.evaluation_grader, EVALUATION)):
        for rollout_id in ids:
            grader.submit(rollout_id, Problem("3", "3"), ["x"])
    assert shares.grader.num_pending == 4
    assert [item.rollout_id for item in shares.evaluation_grader.results()] == EVALUATION
    assert [item.rollout_id for item in shares.grader.results()] == TRAINING
    assert shares.grader.num_pending == 0
