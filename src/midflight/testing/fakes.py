"""Fakes of the protocols, without models or processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midflight.actor.grading import LiveEpisodes
from midflight.protocols import Environment, GradedTask, IncomingWeights
from midflight.types import (
    Completion,
    FinishReason,
    GeneratedTokens,
    GenerationRequest,
    Grade,
    GradedResponse,
    Problem,
    RolloutId,
    TensorSpec,
)

if TYPE_CHECKING:
    from torch import Tensor


class ScriptedGenerator:
    """A Generator whose rollout i takes `length_of(i)` steps. Every token is 0 and has the current weight version.

    The weights of a version arrive `update_steps` steps after they are asked for: 0: at once, otherwise in the next
    step if nothing is in flight. A newer version that is asked for meanwhile replaces the older one, or comes after it
    (`replaces` = False).
    """

    def __init__(self, length_of: Callable[[int], int], update_steps: int = 0, replaces: bool = True) -> None:
        self.weight_version = 0
        self._length_of, self._update_steps, self._replaces = length_of, update_steps, replaces
        self._wishes: list[int] = []  # versions asked for that are not here yet
        self._steps_left = 0  # until the first wish is here
        self._versions: dict[RolloutId, list[int]] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._versions)

    @property
    def num_engines(self) -> int:
        return 1

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        return _tokens(self._versions[rollout_id][start:])

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            resumed = request.generated.weight_versions.tolist() if request.generated else []
            self._versions[request.rollout_id] = resumed

    def step(self) -> list[Completion]:
        self._advance_update()
        for versions in self._versions.values():
            versions.append(self.weight_version)
        ended = [rollout for rollout, versions in self._versions.items() if len(versions) >= self._length_of(rollout)]
        return [self._take(rollout_id, FinishReason.LENGTH) for rollout_id in ended]

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        return [self._take(rollout_id, FinishReason.ABORT) for rollout_id in rollout_ids]

    def adopt(self, version: int) -> None:
        if version <= max([self.weight_version, *self._wishes]):
            return
        if not self._wishes:
            self._steps_left = self._update_steps
        elif self._replaces:
            self._wishes.pop()
        self._wishes.append(version)
        if not self._update_steps:
            self._wishes, self.weight_version = [], version
        elif not self._versions:
            self._wishes, self._steps_left = [version], 0

    def _advance_update(self) -> None:
        if not self._wishes:
            return
        self._steps_left -= 1
        if self._steps_left < 0:
            self.weight_version = self._wishes.pop(0)
            self._steps_left = self._update_steps

    def _take(self, rollout_id: RolloutId, reason: FinishReason) -> Completion:
        return Completion(rollout_id, _tokens(self._versions.pop(rollout_id)), reason)


def _tokens(versions: list[int]) -> GeneratedTokens:
    array = np.array(versions, np.int32)
    return GeneratedTokens(np.zeros_like(array), np.zeros(len(array), np.float32), array)


class CountingEnvironment:
    """A task whose problem i asks for i. Every answer to it gets the reward `reward_of(i)`, which may raise."""

    def __init__(self, reward_of: Callable[[int], float] = lambda index: 1.0, seed: int = 0) -> None:
        self._reward_of, self.seed = reward_of, seed

    def problem(self, index: int) -> Problem:
        return Problem(str(index), prompt=str(index), answer=str(index))

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return [self.problem(-1 - index) for index in range(num_problems)]

    def grade(self, problem: Problem, response: str) -> Grade:
        return Grade(self._reward_of(int(problem.problem_id)))


class ImmediateGrader:
    """A Grader in the caller's process. The result of rollout i is delayed by `delay_of(i)` calls of `results`."""

    def __init__(
        self, environment: Environment | GradedTask, delay_of: Callable[[int], int] = lambda rollout: 0
    ) -> None:
        self._episodes, self._delay_of = LiveEpisodes(environment), delay_of
        self._results: list[tuple[int, GradedResponse]] = []  # (calls to wait for, result)

    @property
    def num_pending(self) -> int:
        return len(self._results)

    def submit(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> None:
        self._results.append((self._delay_of(rollout_id), self._episodes.answer(rollout_id, problem, responses)))

    def submit_group(self, rollout_ids: Sequence[RolloutId], problem: Problem, responses: Sequence[str]) -> None:
        delay = max(map(self._delay_of, rollout_ids))
        answers = self._episodes.answer_group(rollout_ids, problem, responses)
        self._results += [(delay, answer) for answer in answers]

    def results(self, timeout_s: float = 0.0) -> list[GradedResponse]:
        done = [result for delay, result in self._results if delay <= 0]
        self._results = [(delay - 1, result) for delay, result in self._results if delay > 0]
        return done


class DigitTokenizer:
    """A Tokenizer with one token per digit, for CountingEnvironment."""

    bos_token = eos_token_id = unk_token = unk_token_id = chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % 10 for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(str(token_id) for token_id in token_ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **template_arguments: Any,
    ) -> Any:
        raise ValueError("DigitTokenizer has no chat template")

    def get_vocab(self) -> dict[str, int]:
        return {str(digit): digit for digit in range(10)}

    def save_pretrained(self, save_directory: Path) -> None:
        """Write nothing: the vocabulary is in this class."""


class InProcessWeights:
    """All ends of a weight transport between two threads of one process; keeps every version sent."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.sent: dict[int, dict[str, Tensor]] = {}
        self._contents: dict[int, int] = {}
        self.sent_bytes = 0

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        pass

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        copies = {name: tensor.clone() for name, tensor in weights}
        self.sent_bytes += sum(tensor.nbytes for tensor in copies.values())
        self._publish(version, copies, version)

    def relabel(self, version: int) -> None:
        newest = max(self.sent)
        self._publish(version, self.sent[newest], self._contents[newest])

    def wants_weights(self) -> bool:
        return False

    def _publish(self, version: int, weights: dict[str, Tensor], content: int) -> None:
        with self._condition:
            self.sent[version], self._contents[version] = weights, content
            self._condition.notify_all()

    def close(self) -> None:
        pass

    def newest_version(self) -> int | None:
        with self._condition:
            return max(self.sent, default=None)

    def receive(self) -> IncomingWeights:
        with self._condition:
            newest = max(self.sent)
            return IncomingWeights(newest, self._contents[newest], list(self.sent[newest].items()))

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: max(self.sent, default=-1) > newer_than, timeout_s)
