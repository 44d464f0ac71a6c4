"""Conversations of several turns: the tokens of a rollout equal the chat template's tokens of the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from chat_tokenizers import END_OF_TURN, FAMILIES, chat_tokenizer
from midflight.actor.actor import Actor, ActorConfig
from midflight.models.prompts import PromptFormat
from midflight.testing.fakes import CountingEnvironment, ImmediateGrader, ScriptedGenerator
from midflight.types import (
    Completion,
    FinishReason,
    GeneratedTokens,
    GenerationRequest,
    Grade,
    Message,
    Problem,
    RolloutId,
    RolloutStatus,
    SamplingParams,
    Text,
)

QUESTIONS = ["ab!", "a b\n\nEND", "!", "one more"]
ANSWERS = ["END!", "ab\n\nab", "ab ab", "bye"]  # templates of Llama and Gemma strip white space around a message
CONFIG = ActorConfig(batch_size=2, group_size=2, sampling=SamplingParams(max_tokens=200), seed=0)


class Speaker(ScriptedGenerator):
    """Generator that gives these answers in turn; each ends with an end-of-turn token."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__(lambda rollout: len(answers[self.num_turns[RolloutId(rollout)]]))
        self.num_turns: dict[RolloutId, int] = {}
        self._answers = answers

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self.num_turns[request.rollout_id] = self.num_turns.get(request.rollout_id, -1) + 1
        super().add(requests)

    def step(self) -> list[Completion]:
        completions = []
        for ended in super().step():
            ids = np.array(self._answers[self.num_turns[ended.rollout_id]], np.int32)
            tokens = GeneratedTokens(ids, ended.generated.logprobs, ended.generated.weight_versions)
            completions.append(Completion(ended.rollout_id, tokens, FinishReason.STOP))
        return completions


class Interview(CountingEnvironment):
    """Environment that asks the questions in turn, as messages, and checks the answers."""

    def reset(self, problem: Problem) -> Text:
        self._num_asked = 1
        return [{"role": "user", "content": QUESTIONS[0]}]

    def step(self, response: str) -> Text | Grade:
        assert response == ANSWERS[self._num_asked - 1]
        if self._num_asked == len(QUESTIONS):
            return Grade(1.0)
        self._num_asked += 1
        return [{"role": "user", "content": QUESTIONS[self._num_asked - 1]}]


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_equals_the_rendered_conversation(family: str) -> None:
    tokenizer: Any = chat_tokenizer(FAMILIES[family])
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN[family])
    environment = Interview()
    generator = Speaker([[*tokenizer.encode(answer, add_special_tokens=False), end] for answer in ANSWERS])
    actor = Actor(CONFIG, generator, environment, ImmediateGrader(environment), PromptFormat(tokenizer))
    actor.admit(2)
    rollouts = list(actor.open_rollouts())
    while not all(rollout.is_done for rollout in rollouts):
        actor.step()
        actor.collect_grades()
    conversation: list[Message] = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        conversation += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    expected: list[int] = tokenizer.apply_chat_template(conversation, return_dict=False)
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.FINISHED, rollout.failure
        token_ids = GeneratedTokens.joined([segment.tokens for segment in rollout.segments]).token_ids.tolist()
        # The template may write a line break after the last end of turn; a rollout ends with its last sampled token.
        assert token_ids == expected[: len(token_ids)]
        assert tokenizer.decode(expected[len(token_ids) :]) in ("", "\n")
