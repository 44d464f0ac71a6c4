"""The actor under schedules, failing user code, interruptions and restarts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from midflight.actor.actor import Actor, ActorConfig
from midflight.errors import RequestError, RolloutError
from midflight.models.prompts import PromptFormat
from midflight.protocols import Grader, Schedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.types import (
    ActorCheckpoint,
    ChosenBatch,
    FleetView,
    GenerationRequest,
    Grade,
    Problem,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
    Text,
)

CONFIG = ActorConfig(batch_size=4, group_size=2, sampling=SamplingParams(max_tokens=50), seed=0)


class ScheduledActor(Actor):
    """Actor that asks its schedule itself, as the rollout loop would."""

    schedule: Schedule

    def admit_rollouts(self) -> None:
        self.admit(self.schedule.num_to_admit(self.fleet(0)))

    def chosen(self) -> ChosenBatch | None:
        choice = self.schedule.choose_batch(self.fleet(0), self.ledger.ready)
        return None if choice is None else self.take(choice)


def actor_with(
    reward_of: Callable[[int], float] = lambda index: 1.0, length_of: Callable[[int], int] = lambda rollout: 3
) -> ScheduledActor:
    return new_actor(ScriptedGenerator(length_of), ConventionalSchedule(batch_size=4), CountingEnvironment(reward_of))


def new_actor(
    generator: ScriptedGenerator,
    schedule: Schedule,
    environment: CountingEnvironment,
    checkpoint: ActorCheckpoint | None = None,
    config: ActorConfig = CONFIG,
    grader: Grader | None = None,
    max_prompt_tokens: int | None = None,
) -> ScheduledActor:
    grader = grader or ImmediateGrader(environment)
    prompts = PromptFormat(DigitTokenizer(), max_prompt_tokens=max_prompt_tokens)
    actor = ScheduledActor(config, generator, environment, grader, prompts, checkpoint)
    actor.schedule = schedule
    return actor


def run(actor: ScheduledActor, steps: int) -> None:
    for _ in range(steps):
        actor.admit_rollouts()
        actor.step()
        actor.collect_grades()


def chosen_groups(actor: ScheduledActor) -> list[RolloutGroup]:
    chosen = actor.chosen()
    assert chosen is not None
    return chosen.groups


def checkpoint_of(actor: Actor) -> ActorCheckpoint:
    actor.stop()
    return ActorCheckpoint(actor.state, list(actor.open_rollouts()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, "high", None])
def test_reward_that_is_not_finite_fails_only_its_group(bad: object) -> None:
    actor = actor_with(lambda index: bad if index == 0 else 1.0)  # type: ignore[return-value,arg-type]
    run(actor, 8)
    assert actor.state.num_failed_groups == 1
    groups = chosen_groups(actor)
    ((reason, count),) = actor.state.failures.items()
    assert reason.startswith(("TypeError", "ValueError"))
    assert count == 1
    # The next group takes the failed group's place in the batch.
    assert [group.group_id for group in groups] == [1, 2]


def test_failed_rollout_has_its_reason() -> None:
    def reward_of(index: int) -> float:
        raise ZeroDivisionError("no such verifier")

    actor = actor_with(reward_of)
    actor.admit_rollouts()
    rollout = next(iter(actor.open_rollouts()))
    run(actor, 3)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.failure.startswith("ZeroDivisionError: no such verifier (")
    assert "test_actor.py:" in rollout.failure


def test_refused_prompt_fails_only_its_group() -> None:
    class Choosy(ScriptedGenerator):
        def add(self, requests: Sequence[GenerationRequest]) -> None:
            if any(len(request.prompt_token_ids) > 1 for request in requests):
                raise RequestError("its prompt has 2 tokens, not 1 to 1")
            super().add(requests)

    schedule = PipelineSchedule(batch_size=4, num_in_flight=8, queue_capacity=100)
    actor = new_actor(Choosy(lambda _: 1), schedule, CountingEnvironment())
    run(actor, 3)
    assert actor.state.num_failed_groups == 2
    assert actor.fleet(0).num_finished == 20  # problems 0 to 9 have prompts of one digit


class Unpromptable(CountingEnvironment):
    """Environment with three problems without a usable prompt: one too long, one an error, one for a template."""

    def reset(self, problem: Problem) -> Text:
        if problem.problem_id == "2":
            raise KeyError("question")
        if problem.problem_id == "1":
            return [{"role": "user", "content": "hi"}]
        return "too long" if problem.problem_id == "0" else problem.prompt

    def step(self, response: str) -> Grade:
        return Grade(1.0)


def test_problem_without_a_usable_prompt_fails_only_its_group() -> None:
    schedule = PipelineSchedule(batch_size=4, num_in_flight=8, queue_capacity=100)
    actor = new_actor(ScriptedGenerator(lambda _: 1), schedule, Unpromptable(), max_prompt_tokens=2)
    run(actor, 3)
    assert actor.state.num_failed_groups == 3
    too_long, of_template, of_reset = actor.state.failures
    assert too_long == "PromptError: a prompt has 8 tokens, more than engine.max_prompt_tokens = 2"
    assert of_template.startswith(
        "PromptError: the prompt is a list of messages, but the tokenizer has no chat template"
    )
    assert re.fullmatch(r"KeyError: 'question' \(.*test_actor.py:\d+\)", of_reset)
    assert actor.fleet(0).num_finished == 18
    assert actor.state.generated_tokens == 18


def test_restored_actor_fails_problems_without_a_usable_prompt() -> None:
    """The group has failed members, and members that were never admitted."""

    def actor_from(checkpoint: ActorCheckpoint | None) -> ScheduledActor:
        schedule = ConventionalSchedule(batch_size=4)
        return new_actor(ScriptedGenerator(lambda _: 1), schedule, Unpromptable(), checkpoint, max_prompt_tokens=2)

    first = actor_from(None)
    first.admit(1)
    second = actor_from(checkpoint_of(first))
    assert second.state.num_failed_groups == 1
    assert second.fleet(0).num_started == second.fleet(0).num_waiting == 0
    run(second, 8)
    assert second.state.num_failed_groups == 3
    assert [group.group_id for group in chosen_groups(second)] == [3, 4]


def test_failures_in_a_row_end_the_run_with_the_reason() -> None:
    def reward_of(index: int) -> float:
        raise ConnectionError("the verifier is down")

    with pytest.raises(RolloutError, match=r"64 of the last 64 rollouts failed .*, 64 times: ConnectionError: the ver"):
        run(actor_with(reward_of), 1000)


def test_aborted_rollouts_keep_their_tokens_and_resume_first() -> None:
    actor = actor_with(length_of=lambda rollout: 5 + rollout)
    run(actor, 2)
    before = actor.fleet(0)
    actor.abort()
    assert actor.fleet(0).num_in_flight == 0
    assert actor.fleet(0).num_started == before.num_started - 4
    assert actor.state.num_aborted == 4
    assert actor.state.generated_tokens == 8
    run(actor, 6)
    groups = chosen_groups(actor)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.rollout_id for rollout in rollouts] == [0, 1, 2, 3]
    assert [len(rollout.generated) for rollout in rollouts] == [5, 6, 7, 8]
    assert actor.state.generated_tokens == 26


def test_restored_actor_keeps_tokens_and_counts() -> None:
    lengths = [2, 9, 4, 3]
    first = actor_with(length_of=lambda rollout: lengths[rollout % 4])
    run(first, 3)
    checkpoint = checkpoint_of(first)
    assert checkpoint.state.open_group_ids == [0, 1]
    generator = ScriptedGenerator(lambda rollout: lengths[rollout % 4])
    second = new_actor(generator, ConventionalSchedule(4), CountingEnvironment(), checkpoint)
    assert second.fleet(0).num_started == 2
    run(second, 6)
    groups = chosen_groups(second)
    assert [len(rollout.generated) for group in groups for rollout in group.rollouts] == lengths
    assert second.state.generated_tokens == sum(lengths)
    assert second.state.next_group_id == 2


def test_actor_restored_without_tokens_generates_open_groups_again() -> None:
    first = actor_with()
    run(first, 1)
    checkpoint = ActorCheckpoint(checkpoint_of(first).state, [])
    second = new_actor(ScriptedGenerator(lambda _: 3), ConventionalSchedule(4), CountingEnvironment(), checkpoint)
    run(second, 3)
    groups = chosen_groups(second)
    assert [group.problem.problem_id for group in groups] == ["0", "1"]


def test_actor_never_exceeds_the_schedules_rollouts_in_flight() -> None:
    schedule = PipelineSchedule(batch_size=4, num_in_flight=3, queue_capacity=8)
    lengths = np.random.default_rng(0).integers(1, 9, 100)
    actor = new_actor(ScriptedGenerator(lambda rollout: int(lengths[rollout % 100])), schedule, CountingEnvironment())
    for _ in range(100):
        actor.admit_rollouts()
        fleet = actor.fleet(0)
        assert fleet.num_in_flight <= 3
        actor.step()
        actor.collect_grades()
    # Nothing is trained, so the queue fills up and generation stops instead of running ahead.
    assert actor.fleet(0).num_in_flight == 0
    assert 8 <= actor.fleet(0).num_finished <= 8 + 3 + 1


def test_groups_with_equal_rewards_are_counted_and_replaced() -> None:
    rewards = {0: 1.0, 1: 0.0}
    graded: list[int] = []

    def reward_of(index: int) -> float:
        graded.append(index)
        return rewards.get(index, float(len(graded) % 2))

    config = replace(CONFIG, dynamic_sampling=True)
    environment = CountingEnvironment(reward_of)
    generator = ScriptedGenerator(lambda rollout: 1 + rollout)
    actor = new_actor(generator, ConventionalSchedule(4), environment, config=config)
    run(actor, 20)
    assert [group.group_id for group in chosen_groups(actor)] == [2, 3]
    assert actor.state.num_filtered_groups == 2
    assert actor.state.num_failed_groups == actor.state.num_dropped_groups == 0


def test_lengths_are_reported_with_the_next_batch() -> None:
    rewards = iter([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    config = replace(CONFIG, dynamic_sampling=True)
    environment = CountingEnvironment(lambda index: next(rewards))
    generator = ScriptedGenerator(lambda rollout: 1 + rollout)
    actor = new_actor(generator, ConventionalSchedule(4), environment, config=config)
    run(actor, 9)
    assert actor.state.dropped_lengths == [1, 2]  # group 0: both rewards are 1
    chosen = actor.chosen()
    assert chosen is not None
    assert sorted(chosen.generated_lengths) == [1, 2, 3, 4, 5, 6]
    assert chosen.dropped_lengths == [1, 2]
    assert actor.state.generated_lengths == actor.state.dropped_lengths == []


def test_task_with_equal_rewards_ends_the_run_with_the_reason() -> None:
    config = replace(CONFIG, dynamic_sampling=True, max_filtered_in_a_row=10)
    actor = new_actor(ScriptedGenerator(lambda _: 1), ConventionalSchedule(4), CountingEnvironment(), config=config)
    with pytest.raises(RolloutError, match=r"in 10 groups in a row all rewards were equal \(the last: 1\)"):
        run(actor, 100)


def test_group_waits_for_its_last_grade() -> None:
    environment = CountingEnvironment()
    slow = ImmediateGrader(environment, delay_of=lambda rollout: 5 if rollout == 1 else 0)
    schedule = ConventionalSchedule(4)
    actor = new_actor(ScriptedGenerator(lambda _: 1), schedule, environment, grader=slow)
    run(actor, 3)
    fleet = actor.fleet(0)
    assert (fleet.num_in_flight, actor.ledger.num_ungraded, fleet.num_finished, fleet.oldest_open_group) == (0, 1, 2, 0)
    assert actor.chosen() is None
    run(actor, 3)
    assert [group.group_id for group in chosen_groups(actor)] == [0, 1]


def test_restored_actor_grades_ungraded_responses() -> None:
    environment = CountingEnvironment()
    never = ImmediateGrader(environment, delay_of=lambda rollout: 10**6)
    schedule = ConventionalSchedule(4)
    first = new_actor(ScriptedGenerator(lambda _: 3), schedule, environment, grader=never)
    run(first, 5)
    generator = ScriptedGenerator(lambda _: 3)
    second = new_actor(generator, schedule, environment, checkpoint_of(first))
    second.collect_grades()
    assert generator.num_in_flight == 0
    assert [group.group_id for group in chosen_groups(second)] == [0, 1]


@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
def test_slow_verifier_slows_generation_down(when_full: Literal["block", "drop_oldest"]) -> None:
    """Ungraded rollouts count towards the queue capacity, so generation stops until grades arrive."""
    schedule = PipelineSchedule(batch_size=4, num_in_flight=8, queue_capacity=12, when_full=when_full)
    environment = CountingEnvironment()
    grader = ImmediateGrader(environment, delay_of=lambda _: 1000)
    actor = new_actor(ScriptedGenerator(lambda _: 3), schedule, environment, grader=grader)
    run(actor, 100)
    assert actor.fleet(0).num_in_flight == 0
    assert 12 <= actor.ledger.num_ungraded <= 12 + 8
    run(actor, 1000)
    assert actor.fleet(0).num_finished > 12


def test_oldest_interrupted_rollout_resumes_first() -> None:
    class Limited(ConventionalSchedule):
        limit = 4

        def num_to_admit(self, fleet: FleetView) -> int:
            return self.limit - fleet.num_in_flight

    actor = new_actor(ScriptedGenerator(lambda _: 9), Limited(4), CountingEnvironment())
    run(actor, 2)
    actor.abort()
    Limited.limit = 2
    run(actor, 1)
    assert sorted(actor.ledger.in_flight) == [0, 1]
