"""The loop that training and evaluation share: generate a turn, submit the response, continue or end.

A rollout is in flight until its turn ends, then with the environment. A grade ends the rollout; a text begins its next
turn. Only the environment's text is tokenized; sampled tokens are kept as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from midflight.actor.failures import log_once, reason_of
from midflight.actor.partials import segments_from
from midflight.envs.one_turn import first_text, wants_group, with_turns
from midflight.errors import PromptError, RequestError
from midflight.models.prompts import PromptFormat
from midflight.protocols import Environment, Generator, GradedTask, Grader
from midflight.types import (
    Completion,
    FinishReason,
    GeneratedTokens,
    GenerationRequest,
    Grade,
    GradedResponse,
    GroupId,
    Problem,
    Rollout,
    RolloutId,
    RolloutStatus,
    SamplingParams,
    Segment,
    Text,
)

_NO_PROMPT = Segment.given(())


class Episodes:
    """Rollouts that are in flight or with the environment.

    A rollout samples up to `sampling.max_tokens` tokens over all its turns, and is at most `max_length` tokens long
    (None: no limit). If it has no room for another turn, its finish reason is LENGTH, and its reward is 0 unless the
    environment graded its last response.

    If the environment grades whole groups, ended rollouts are held until no member of their group is left to generate,
    and are then submitted together. A member that failed to be generated is left out.
    """

    def __init__(
        self,
        generator: Generator,
        environment: Environment | GradedTask,
        grader: Grader,
        prompts: PromptFormat,
        sampling: SamplingParams,
        seed: int,
        max_length: int | None = None,
        group_of: Callable[[Rollout], Sequence[Rollout]] = lambda rollout: (rollout,),
    ) -> None:
        """Start without rollouts; `group_of` returns all members of a rollout's group."""
        self._generator, self._grader, self._prompts = generator, grader, prompts
        self._task, self._environment = environment, with_turns(environment)
        self._group_of = group_of
        self._held: set[RolloutId] = set()
        self._sampling, self._seed, self._max_length = sampling, seed, max_length
        self._active: dict[RolloutId, tuple[Rollout, Problem]] = {}
        self.num_generated = 0  # tokens of turns that ended or were interrupted

    @property
    def num_held(self) -> int:
        """Number of ended rollouts that wait for other members of their groups."""
        return len(self._held)

    def new_rollouts(self, problem: Problem, group_id: GroupId, rollout_ids: Sequence[RolloutId]) -> list[Rollout]:
        """Return rollouts to start; they are FAILED if the problem's prompt cannot be made."""
        prompt, status, failure = _NO_PROMPT, RolloutStatus.PARTIAL, ""
        try:
            prompt = self._prompt(problem)
        except Exception as error:  # an error of the environment, or a prompt that does not fit
            log_once(error)
            status, failure = RolloutStatus.FAILED, reason_of(error)
        return [Rollout(rollout_id, group_id, status, [prompt], failure=failure) for rollout_id in rollout_ids]

    def start(self, rollouts: Sequence[tuple[Rollout, Problem]]) -> None:
        """Generate the current turns of these rollouts, except FAILED ones.

        A rollout that the generator refuses becomes FAILED.
        """
        rollouts = [(rollout, problem) for rollout, problem in rollouts if not rollout.is_done]
        try:
            self._generator.add([self._request(rollout) for rollout, _ in rollouts])
        except RequestError as error:
            if len(rollouts) > 1:
                for pair in rollouts:
                    self.start([pair])
                return
            self._fail(*rollouts[0], f"{type(error).__name__}: {error}")
            return
        for rollout, problem in rollouts:
            rollout.status = RolloutStatus.RUNNING
            self._active[rollout.rollout_id] = rollout, problem

    def submit(self, rollout: Rollout, problem: Problem) -> None:
        """Submit the response of an ended turn to the environment, or hold the rollout until its group has ended."""
        self._active[rollout.rollout_id] = rollout, problem
        if wants_group(self._task, problem):
            self._held.add(rollout.rollout_id)
            self._submit_group(rollout, problem)
            return
        *earlier, last = rollout.turns
        responses = [self._text(turn, FinishReason.STOP) for turn in earlier]
        responses.append(self._text(last, rollout.finish_reason))
        self._grader.submit(rollout.rollout_id, problem, responses)

    def step(self) -> list[Rollout]:
        """Sample one token for every rollout in flight; submit and return the rollouts whose turn ended.

        A rollout with log-probabilities that are not finite is FAILED instead of submitted.
        """
        completions = sorted(self._generator.step(), key=lambda completion: completion.rollout_id)
        return [self._end_turn(completion) for completion in completions]

    def answers(self, timeout_s: float = 0.0) -> list[Rollout]:
        """Process the environment's answers, waiting up to `timeout_s` for the first one; return their rollouts.

        Each rollout is then FINISHED, FAILED, or RUNNING with its next turn in flight.
        """
        return [self._take(answer) for answer in self._grader.results(timeout_s)]

    def interrupt(self, rollout_ids: Sequence[RolloutId]) -> list[Rollout]:
        """Take these rollouts out of the generator, keeping their tokens; return the ones that were in flight."""
        rollouts = []
        for completion in self._generator.abort(rollout_ids):
            rollout, _ = self._active.pop(completion.rollout_id)
            self._take_tokens(rollout, completion)
            rollout.status, rollout.num_carried = RolloutStatus.PARTIAL, rollout.num_sampled
            rollouts.append(rollout)
        return rollouts

    def tokens_of(self, rollout: Rollout, start: int) -> list[Segment]:
        """Tokens after the prompt so far, without the first `start`."""
        if rollout.status is RolloutStatus.RUNNING and rollout.finish_reason is None:
            before = _before_turn(rollout)[1:]
            with contextlib.suppress(KeyError):  # the turn has just ended; the next `step` reports it
                new = self._generator.generated(rollout.rollout_id, max(0, start - sum(map(len, before))))
                return [*segments_from(before, start), *([Segment(new)] if len(new) else [])]
        return segments_from(rollout.segments[1:], start)

    # ----------------------------------------------------------------------------------------------------------

    def _prompt(self, problem: Problem) -> Segment:
        token_ids = self._prompts.encode_prompt(first_text(self._environment, problem))
        limit = self._prompts.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            raise PromptError(f"a prompt has {len(token_ids)} tokens, more than engine.max_prompt_tokens = {limit}")
        return Segment.given(token_ids)

    def _request(self, rollout: Rollout) -> GenerationRequest:
        context, turn = GeneratedTokens.joined([segment.tokens for segment in _before_turn(rollout)]), turn_of(rollout)
        num_sampled = rollout.num_sampled - len(turn)
        sampling = self._sampling
        if num_sampled:
            sampling = replace(sampling, max_tokens=self._room(num_sampled, len(context)))
        return GenerationRequest(
            rollout_id=rollout.rollout_id,
            prompt_token_ids=context.token_ids,
            sampling=sampling,
            seed=self._seed,
            generated=turn if len(turn) else None,
            first_position=num_sampled,
            prompt_version=int(context.weight_versions.max(initial=0)),
        )

    def _room(self, num_sampled: int, num_tokens: int) -> int:
        """Number of tokens that may still be sampled, after `num_sampled` sampled of `num_tokens` tokens."""
        room = self._sampling.max_tokens - num_sampled
        return room if self._max_length is None else min(room, self._max_length - num_tokens)

    def _end_turn(self, completion: Completion) -> Rollout:
        rollout, problem = self._active[completion.rollout_id]
        if (ended := self._prompts.until_stop(completion.generated, self._sampling.stop)) is not None:
            completion = replace(completion, generated=ended, finish_reason=FinishReason.STOP)
        self._take_tokens(rollout, completion)
        rollout.finish_reason = completion.finish_reason
        if np.isfinite(completion.generated.logprobs).all():
            self.submit(rollout, problem)
        else:
            self._fail(rollout, problem, "the policy sampled a token with a log-probability that is not finite")
        return rollout

    def _submit_group(self, rollout: Rollout, problem: Problem) -> None:
        """Submit the rollout's group, if all its members are held or failed."""
        members = [member for member in self._group_of(rollout) if not member.is_done]
        if not members or any(member.rollout_id not in self._held for member in members):
            return
        responses = [self._text(turn_of(member), member.finish_reason) for member in members]
        rollout_ids = [member.rollout_id for member in members]
        self._held.difference_update(rollout_ids)
        self._grader.submit_group(rollout_ids, problem, responses)

    def _text(self, turn: GeneratedTokens, finish_reason: FinishReason | None) -> str:
        return self._prompts.response_text(turn, finish_reason, self._sampling.stop)

    def _take_tokens(self, rollout: Rollout, completion: Completion) -> None:
        self.num_generated += len(completion.generated) - len(turn_of(rollout))
        turn = [Segment(completion.generated)] if len(completion.generated) else []
        rollout.segments = [*_before_turn(rollout), *turn]

    def _take(self, answer: GradedResponse) -> Rollout:
        rollout, problem = self._active[answer.rollout_id]
        if answer.text is not None:
            self._continue(rollout, problem, answer.text)
        else:
            self._end(rollout, answer.grade, answer.failure)
        return rollout

    def _continue(self, rollout: Rollout, problem: Problem, text: Text) -> None:
        last_token = int(rollout.segments[-1].tokens.token_ids[-1])
        try:
            given = Segment.given(self._prompts.encode_turn(text, last_token))
        except PromptError as error:
            self._end(rollout, failure=f"{type(error).__name__}: {error}")
            return
        if not len(given):
            self._end(rollout, failure="the environment's text has no tokens")
        elif (
            rollout.finish_reason is FinishReason.LENGTH
            or self._room(rollout.num_sampled, sum(map(len, rollout.segments)) + len(given)) < 1
        ):
            rollout.finish_reason = FinishReason.LENGTH
            self._end(rollout, Grade(0.0))
        else:
            rollout.segments = [*rollout.segments, given]
            rollout.finish_reason = None
            self.start([(rollout, problem)])

    def _fail(self, rollout: Rollout, problem: Problem, why: str) -> None:
        """End a rollout that could not be generated; its group may have waited for it."""
        self._end(rollout, failure=why)
        if wants_group(self._task, problem):
            self._submit_group(rollout, problem)

    def _end(self, rollout: Rollout, grade: Grade | None = None, failure: str = "") -> None:
        self._active.pop(rollout.rollout_id, None)
        if grade is None:
            rollout.status, rollout.failure = RolloutStatus.FAILED, failure
        else:
            rollout.status = RolloutStatus.FINISHED
            rollout.reward, rollout.reward_components = grade.reward, grade.components
            rollout.answer = grade.answer


def turn_of(rollout: Rollout) -> GeneratedTokens:
    """Sampled tokens of the current turn; empty before its first token."""
    last = rollout.segments[-1]
    return last.tokens if last.sampled else GeneratedTokens.none()


def _before_turn(rollout: Rollout) -> list[Segment]:
    return rollout.segments[:-1] if rollout.segments[-1].sampled else rollout.segments
