"""Groups that are graded together: ended members wait for the others, and a restart loses none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from midflight.actor.actor import Actor, ActorConfig
from midflight.errors import RolloutError
from midflight.models.prompts import PromptFormat
from midflight.schedules.conventional import ConventionalSchedule
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.types import (
    ActorCheckpoint,
    Completion,
    Grade,
    Problem,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
)

CONFIG = ActorConfig(batch_size=6, group_size=3, sampling=SamplingParams(max_tokens=50), seed=0)
SCHEDULE = ConventionalSchedule(6)


class Ranking(CountingEnvironment):
    """Task whose reward is the rank of the response's length in its group."""

    def __init__(self) -> None:
        super().__init__()
        self.graded: list[tuple[str, int]] = []  # problem, number of responses

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade]:
        self.graded.append((problem.problem_id, len(responses)))
        lengths = sorted(map(len, responses))
        return [Grade(float(lengths.index(len(response))), answer=response) for response in responses]


class BadNumbers(ScriptedGenerator):
    """Generator whose rollout 1 has a log-probability that is not finite."""

    def step(self) -> list[Completion]:
        return [
            replace(item, generated=replace(item.generated, logprobs=np.full_like(item.generated.logprobs, np.nan)))
            if item.rollout_id == 1
            else item
            for item in super().step()
        ]


def actor_for(
    task: Ranking, generator: ScriptedGenerator | None = None, checkpoint: ActorCheckpoint | None = None
) -> Actor:
    generator = generator or ScriptedGenerator(lambda rollout: 2 + 3 * (rollout % 3))
    return Actor(CONFIG, generator, task, ImmediateGrader(task), PromptFormat(DigitTokenizer()), checkpoint)


def run(actor: Actor, steps: int) -> None:
    for _ in range(steps):
        actor.admit(SCHEDULE.num_to_admit(actor.fleet(0)))
        actor.step()
        actor.collect_grades()


def chosen(actor: Actor) -> list[RolloutGroup]:
    choice = SCHEDULE.choose_batch(actor.fleet(0), actor.ledger.ready)
    assert choice
    batch = actor.take(choice)
    assert batch
    return batch.groups


def rewards(groups: Sequence[RolloutGroup]) -> list[list[float]]:
    return [[rollout.reward for rollout in group.rollouts] for group in groups]


def test_group_is_graded_when_its_last_member_has_ended() -> None:
    task = Ranking()
    actor = actor_for(task)
    run(actor, 7)
    assert task.graded == []
    assert (actor.ledger.num_ungraded, actor.num_ungraded, actor.fleet(0).num_ungraded) == (4, 0, 0)
    run(actor, 1)
    assert task.graded == [("0", 3), ("1", 3)]
    assert rewards(chosen(actor)) == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]


@pytest.mark.parametrize("steps", range(1, 9))
def test_restart_grades_each_open_group_whole(steps: int) -> None:
    """Held members stay held over an interruption and a restart, whenever these come."""
    first = actor_for(Ranking())
    run(first, steps)
    first.abort()
    first.stop()
    task = Ranking()
    second = actor_for(task, checkpoint=ActorCheckpoint(first.state, list(first.open_rollouts())))
    run(second, 9)
    assert set(task.graded) <= {("0", 3), ("1", 3)}
    assert rewards(chosen(second)) == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    assert second.state.generated_tokens == 2 * (2 + 5 + 8)


def test_member_that_cannot_be_generated_holds_up_no_other() -> None:
    task = Ranking()
    actor = actor_for(task, BadNumbers(lambda rollout: 1 + rollout % 3))
    run(actor, 3)
    assert task.graded == [("0", 2), ("1", 3)]
    assert actor.state.num_failed_groups == 1
    assert "not finite" in next(iter(actor.state.failures))


def test_last_member_that_cannot_be_generated_releases_its_group() -> None:
    task = Ranking()
    actor = actor_for(task, BadNumbers(lambda rollout: 9 if rollout == 1 else 1))
    run(actor, 9)
    assert task.graded[:2] == [("1", 3), ("0", 2)]
    assert actor.state.num_failed_groups == 1


def test_wants_groups_may_depend_on_the_problem() -> None:
    class Mixed(Ranking):
        def wants_groups(self, problem: Problem) -> bool:
            return problem.problem_id == "1"

    task = Mixed()
    actor = actor_for(task)
    run(actor, 8)
    assert task.graded == [("1", 3)]
    assert rewards(chosen(actor)) == [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]


def test_all_members_of_a_failed_group_count_as_failed() -> None:
    class Broken(Ranking):
        def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade]:
            raise ConnectionError("the judge is down")

    actor = actor_for(Broken(), ScriptedGenerator(lambda _: 1))
    with pytest.raises(
        RolloutError, match=r"64 of the last 64 rollouts failed .* 64 times: ConnectionError: the judge"
    ):
        run(actor, 100)
    assert {rollout.status for rollout in actor.open_rollouts()} >= {RolloutStatus.FAILED}
