"""Rollouts of several turns: interruptions change nothing, and log-probabilities match the trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from equivalence.test_provenance import logprobs_under
from midflight.actor.actor import Actor, ActorConfig
from midflight.actor.partials import PartialBuffer
from midflight.models.prompts import PromptFormat
from midflight.preprocess.batches import trajectory_of
from midflight.preprocess.packing import pack
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import BatchChoice, FinishReason, Grade, GroupId, Problem, Rollout, SamplingParams

NUM_GROUPS = 4
STOPS = (1, 2, 3, 4, 5, 6, 7, 8)
SAMPLING = SamplingParams(max_tokens=14, stop_token_ids=STOPS)
CONFIG = ActorConfig(batch_size=2 * NUM_GROUPS, group_size=2, sampling=SAMPLING, seed=5, max_length=72)


class Talkative(CountingEnvironment):
    """Environment whose text depends on all earlier responses; it grades the third response."""

    def reset(self, problem: Problem) -> str:
        self._said = ""
        self._num_turns = 0
        return problem.text

    def step(self, response: str) -> str | Grade:
        self._said += response
        self._num_turns += 1
        return Grade(float(len(self._said))) if self._num_turns == 3 else f"{len(self._said)}{self._num_turns}"


def new_actor(partials: PartialBuffer | None = None) -> Actor:
    engine, environment = tiny_engine(tiny_model(), max_new_tokens=40), Talkative()
    grader = ImmediateGrader(environment, delay_of=lambda rollout: rollout % 2)
    return Actor(
        CONFIG, engine, environment, grader, PromptFormat(DigitTokenizer()), partials.load() if partials else None
    )


def run_to_end(actor: Actor, disturb: Callable[[Actor, int], Actor]) -> list[Rollout]:
    """Return the rollouts of the first groups; `disturb` may replace the actor after every tick."""
    tick = 0
    while actor.ledger.ready.num_rollouts < CONFIG.batch_size:
        fleet = actor.fleet(0)
        actor.admit(CONFIG.batch_size - fleet.num_started)
        actor.step()
        actor.collect_grades()
        tick += 1
        actor = disturb(actor, tick)
    batch = actor.take(BatchChoice(train=tuple(map(GroupId, range(NUM_GROUPS)))))
    assert batch
    return [rollout for group in batch.groups for rollout in group.rollouts]


def undisturbed(actor: Actor, tick: int) -> Actor:
    return actor


@pytest.fixture(scope="module")
def expected() -> list[Rollout]:
    rollouts = run_to_end(new_actor(), undisturbed)
    assert {len(rollout.turns) for rollout in rollouts} >= {2, 3}, "choose another seed"
    assert {rollout.finish_reason for rollout in rollouts} == {FinishReason.STOP, FinishReason.LENGTH}
    return rollouts


def assert_same(rollouts: list[Rollout], expected: list[Rollout]) -> None:
    for ours, theirs in zip(rollouts, expected, strict=True):
        assert (ours.rollout_id, ours.finish_reason, ours.reward) == (
            theirs.rollout_id,
            theirs.finish_reason,
            theirs.reward,
        )
        for one, other in zip(ours.segments, theirs.segments, strict=True):
            assert one.sampled == other.sampled
            assert one.tokens.token_ids.tolist() == other.tokens.token_ids.tolist()
            np.testing.assert_allclose(one.tokens.logprobs, other.tokens.logprobs, atol=1e-5)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_aborted_and_resumed_matches_uninterrupted(every: int, expected: list[Rollout]) -> None:
    def disturb(actor: Actor, tick: int) -> Actor:
        if tick % every == 0:
            actor.abort()
        return actor

    assert_same(run_to_end(new_actor(), disturb), expected)


@pytest.mark.parametrize("every", [2, 3])
def test_killed_and_restored_matches_uninterrupted(every: int, expected: list[Rollout], tmp_path: Path) -> None:
    """The process is killed right after a save."""

    def disturb(actor: Actor, tick: int) -> Actor:
        if tick % every:
            return actor
        with closing(PartialBuffer(tmp_path / "partials.sqlite")) as partials:
            partials.save(actor.state, actor.open_rollouts(), actor.tokens_of)
            return new_actor(partials)

    assert_same(run_to_end(new_actor(), disturb), expected)


def test_logprobs_match_training(expected: list[Rollout]) -> None:
    model = tiny_model()
    trajectories = [
        trajectory_of(rollout, 1.0, rollout.reward, np.ones(rollout.num_sampled, np.bool_)) for rollout in expected
    ]
    for trajectory, rollout in zip(trajectories, expected, strict=True):
        assert trajectory.loss_mask.sum() == rollout.num_sampled
        assert not trajectory.behavior_logprobs[~trajectory.loss_mask].any()
    for microbatch in pack(trajectories, max_tokens=200):
        logprobs = logprobs_under(model, dict(model.named_parameters()), microbatch)
        mask = microbatch.loss_mask
        np.testing.assert_allclose(logprobs[mask], microbatch.behavior_logprobs[mask], atol=1e-4)
