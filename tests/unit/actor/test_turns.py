"""Rollouts of several turns: segments, counts, restarts and endings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from midflight.actor.actor import Actor, ActorConfig
from midflight.models.prompts import PromptFormat
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.types import (
    ActorCheckpoint,
    Completion,
    FinishReason,
    GenerationRequest,
    Grade,
    Problem,
    Rollout,
    RolloutId,
    RolloutStatus,
    SamplingParams,
)

CONFIG = ActorConfig(batch_size=2, group_size=2, sampling=SamplingParams(max_tokens=50), seed=0)
TURN = 3  # tokens of a turn


class TurnGenerator(ScriptedGenerator):
    """Generator whose turns stop after `TURN` tokens, or end at `max_tokens` if that is less."""

    def __init__(self) -> None:
        super().__init__(lambda rollout: min(TURN, self.requests[RolloutId(rollout)].sampling.max_tokens))
        self.requests: dict[RolloutId, GenerationRequest] = {}

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests |= {request.rollout_id: request for request in requests}
        super().add(requests)

    def step(self) -> list[Completion]:
        return [
            completion
            if len(completion.generated) == self.requests[completion.rollout_id].sampling.max_tokens
            else replace(completion, finish_reason=FinishReason.STOP)
            for completion in super().step()
        ]


class Talking(CountingEnvironment):
    """Environment that answers `text` to every turn except the last, which gets reward 1."""

    def __init__(self, num_turns: int = 2, text: str = "78") -> None:
        super().__init__()
        self._num_left, self._text = num_turns, text

    def reset(self, problem: Problem) -> str:
        return problem.text

    def step(self, response: str) -> str | Grade:
        assert response == "0" * (TURN - 1), "a response comes without the token that ended it"
        self._num_left -= 1
        return self._text if self._num_left else Grade(1.0)


def new_actor(
    environment: Talking,
    *,
    config: ActorConfig = CONFIG,
    delay_of: Callable[[int], int] = lambda rollout: 0,
    checkpoint: ActorCheckpoint | None = None,
) -> tuple[Actor, TurnGenerator]:
    generator = TurnGenerator()
    grader = ImmediateGrader(environment, delay_of)
    return Actor(config, generator, environment, grader, PromptFormat(DigitTokenizer()), checkpoint), generator


def run(actor: Actor, steps: int) -> None:
    for _ in range(steps):
        actor.step()
        actor.collect_grades()


def rollouts_of(actor: Actor) -> list[Rollout]:
    return list(actor.open_rollouts())


def test_environments_text_is_a_segment_between_turns() -> None:
    actor, generator = new_actor(Talking())
    actor.admit(2)
    run(actor, 2 * TURN)
    for rollout in rollouts_of(actor):
        assert rollout.status is RolloutStatus.FINISHED
        assert rollout.reward == 1.0
        assert [segment.sampled for segment in rollout.segments] == [False, True, False, True]
        assert [segment.tokens.token_ids.tolist() for segment in rollout.segments] == [[8], [0] * 3, [5, 6], [0] * 3]
        request = generator.requests[rollout.rollout_id]
        assert request.prompt_token_ids.tolist() == [8, 0, 0, 0, 5, 6]
        assert request.first_position == 3, "random numbers continue from the first turn"
        assert request.sampling.max_tokens == 50 - 3


def test_next_turn_starts_without_admission() -> None:
    actor, _ = new_actor(Talking(), delay_of=lambda rollout: 2)
    actor.admit(2)
    run(actor, TURN)
    fleet = actor.fleet(0)
    assert (fleet.num_started, fleet.num_in_flight, fleet.num_ungraded) == (2, 0, 2)
    run(actor, 2)
    fleet = actor.fleet(0)
    assert (fleet.num_started, fleet.num_in_flight, fleet.num_ungraded) == (2, 2, 0)


def test_length_of_a_rollout_covers_all_turns() -> None:
    actor, _ = new_actor(Talking(num_turns=3))
    actor.admit(2)
    run(actor, TURN + 1)
    assert actor.state.generated_lengths == []
    run(actor, 2 * TURN - 1)
    assert actor.state.generated_lengths == [9, 9]
    assert actor.state.generated_tokens == 18
    assert actor.fleet(0).num_finished == 2


@pytest.mark.parametrize(
    ("limits", "num_sampled"),
    [
        ({"sampling": SamplingParams(max_tokens=TURN)}, TURN),
        ({"sampling": SamplingParams(max_tokens=2 * TURN - 1)}, 2 * TURN - 1),
        ({"max_length": 1 + TURN + 2}, TURN),
        ({"max_length": 1 + TURN + 2 + TURN}, 2 * TURN),
    ],
)
def test_rollout_without_room_for_its_next_turn_has_reward_0(limits: dict[str, object], num_sampled: int) -> None:
    class Deaf(Talking):
        def step(self, response: str) -> str | Grade:
            return "78"

    actor, _ = new_actor(Deaf(), config=replace(CONFIG, **limits))  # type: ignore[arg-type]
    actor.admit(2)
    run(actor, 4 * TURN)
    for rollout in rollouts_of(actor):
        assert (rollout.status, rollout.finish_reason) == (RolloutStatus.FINISHED, FinishReason.LENGTH)
        assert rollout.reward == 0.0
        assert rollout.num_sampled == num_sampled
        assert rollout.segments[-1].sampled, "text without a turn after it is left out"


def test_text_without_tokens_fails_its_rollout() -> None:
    actor, _ = new_actor(Talking(text=""))
    actor.admit(2)
    rollout = rollouts_of(actor)[0]
    run(actor, TURN)
    assert rollout.failure == "the environment's text has no tokens"
    assert actor.state.num_failed_groups == 1


@pytest.mark.parametrize("steps", range(1, 3 * TURN))
def test_restored_actor_continues_in_the_same_turn(steps: int) -> None:
    environment = Talking(num_turns=3)
    first, _ = new_actor(environment, delay_of=lambda rollout: rollout % 2)
    first.admit(2)
    run(first, steps)
    first.stop()
    checkpoint = ActorCheckpoint(first.state, [replace(rollout) for rollout in first.open_rollouts()])
    second, _ = new_actor(environment, checkpoint=checkpoint)
    second.admit(len(second.ledger._waiting))
    run(second, 3 * TURN)
    assert [rollout.num_sampled for rollout in rollouts_of(second)] == [9, 9]
    assert second.state.generated_lengths == [9, 9]
    assert second.state.generated_tokens == 18
    assert second.fleet(0).num_finished == 2
