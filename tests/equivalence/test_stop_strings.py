"""Stop strings: the same tokens with and without stop rules, interrupted or not, in process or behind HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contract.conftest import start_server as start_server  # a fixture
from contract.conftest import tokenizer as tokenizer  # a fixture
from midflight.actor.actor import Actor, ActorConfig
from midflight.generation.client import HTTPGenerator
from midflight.models.prompts import PromptFormat
from midflight.models.stopping import StopRules
from midflight.protocols import Generator
from midflight.testing.fakes import CountingEnvironment, ImmediateGrader
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import FinishReason, Grade, Problem, Rollout, RolloutStatus, SamplingParams

NUM_ROLLOUTS = 8
PLAIN = SamplingParams(max_tokens=24, stop_token_ids=(2,))


class Listening(CountingEnvironment):
    """Environment that notes the responses."""

    def __init__(self) -> None:
        super().__init__()
        self.responses: list[str] = []

    def problem(self, index: int) -> Problem:
        return Problem(str(index), f"a{index}:")

    def grade(self, problem: Problem, response: str) -> Grade:
        self.responses.append(response)
        return Grade(1.0)


def rollouts_of(
    generator: Generator, tokenizer: Any, sampling: SamplingParams, interrupt_every: int = 0
) -> tuple[list[Rollout], list[str]]:
    """Return finished rollouts and their responses; all are interrupted after every `interrupt_every` steps."""
    environment = Listening()
    config = ActorConfig(batch_size=NUM_ROLLOUTS, group_size=2, sampling=sampling, seed=3)
    actor = Actor(config, generator, environment, ImmediateGrader(environment), PromptFormat(tokenizer))
    actor.admit(NUM_ROLLOUTS)
    rollouts = sorted(actor.open_rollouts(), key=lambda rollout: rollout.rollout_id)
    step = 0
    while not all(rollout.is_done for rollout in rollouts):
        actor.step()
        actor.collect_grades()
        step += 1
        if interrupt_every and step % interrupt_every == 0:
            actor.abort()
            actor.admit(actor.fleet(0).num_waiting)
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.FINISHED}
    return rollouts, sorted(environment.responses)


@pytest.fixture
def sampling(tokenizer: Any) -> SamplingParams:
    """Sampling parameters with stop strings that end most responses early."""
    rollouts, _ = rollouts_of(tiny_engine(tiny_model()), tokenizer, PLAIN)
    texts = [tokenizer.decode(rollout.generated.token_ids, skip_special_tokens=True) for rollout in rollouts]
    return replace(PLAIN, stop=tuple(text[4:6] for text in texts[:5]))


def assert_same(one: list[Rollout], other: list[Rollout], rounding: float = 1e-5) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours.finish_reason is theirs.finish_reason
        assert ours.generated.token_ids.tolist() == theirs.generated.token_ids.tolist()
        np.testing.assert_allclose(ours.generated.logprobs, theirs.generated.logprobs, rtol=0, atol=rounding)


def test_engine_with_stop_rules_gives_the_tokens_of_a_cut_response(tokenizer: Any, sampling: SamplingParams) -> None:
    full, _ = rollouts_of(tiny_engine(tiny_model()), tokenizer, PLAIN)
    cut, cut_texts = rollouts_of(tiny_engine(tiny_model()), tokenizer, sampling)
    engine = tiny_engine(tiny_model(), stop_rules=StopRules(tokenizer))
    stopped, texts = rollouts_of(engine, tokenizer, sampling)
    assert_same(stopped, cut)
    assert texts == cut_texts
    shorter = [len(ours.generated) < len(theirs.generated) for ours, theirs in zip(stopped, full, strict=True)]
    assert sum(shorter) >= 4, "choose other stop strings"
    for ours, theirs in zip(stopped, full, strict=True):
        assert ours.generated.token_ids.tolist() == theirs.generated.token_ids[: len(ours.generated)].tolist()
    assert not any(string in text for text in texts for string in sampling.stop)
    assert any(rollout.finish_reason is FinishReason.STOP for rollout in stopped)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("with_rules", [True, False])
def test_interrupted_matches_uninterrupted(
    every: int, with_rules: bool, tokenizer: Any, sampling: SamplingParams
) -> None:
    rules = StopRules(tokenizer)
    expected, texts = rollouts_of(tiny_engine(tiny_model(), stop_rules=rules), tokenizer, sampling)
    engine = tiny_engine(tiny_model(), stop_rules=rules if with_rules else None)
    resumed, resumed_texts = rollouts_of(engine, tokenizer, sampling, interrupt_every=every)
    assert_same(resumed, expected)
    assert resumed_texts == texts


@pytest.mark.parametrize("with_rules", [True, False])
def test_server_matches_the_engine(
    with_rules: bool, tokenizer: Any, sampling: SamplingParams, start_server: Any
) -> None:
    expected, texts = rollouts_of(tiny_engine(tiny_model(), stop_rules=StopRules(tokenizer)), tokenizer, sampling)
    server = start_server(tiny_engine(tiny_model(), stop_rules=StopRules(tokenizer) if with_rules else None))
    with HTTPGenerator(server.url, timeout_s=30, chunk_tokens=3) as client:
        served, served_texts = rollouts_of(client, tokenizer, sampling)
    assert_same(served, expected)
    assert served_texts == texts
