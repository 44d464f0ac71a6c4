"""One generator and one grader for two users: training, and an evaluation during the run.

    SharedGenerator.step     makes the engines take a step, and returns the completions of training
    EvaluationGenerator.step returns the completions of the evaluation that have arrived since its last call

Rollout ids tell the users apart. Training never sees a completion or an answer of the evaluation, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence

from midflight.engine.delegating import DelegatingGenerator
from midflight.protocols import Generator, Grader
from midflight.types import Completion, GradedResponse, Problem, RolloutId

# Rollouts of training count from 0; a signed 64-bit integer still holds every id of an evaluation.
FIRST_EVALUATION_ID = RolloutId(1 << 62)


class SharedGenerator(DelegatingGenerator):
    """Implements Generator for training. `num_in_flight` counts the requests of both users."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(generator)
        self._arrived: list[Completion] = []  # completions of the evaluation

    def step(self) -> list[Completion]:
        mine: list[Completion] = []
        for completion in self._generator.step():
            (self._arrived if _is_evaluation(completion.rollout_id) else mine).append(completion)
        return mine

    def take_arrived(self) -> list[Completion]:
        """Return the completions of the evaluation since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived


class EvaluationGenerator(DelegatingGenerator):
    """Implements Generator for an evaluation beside training, which takes the steps."""

    def __init__(self, shared: SharedGenerator) -> None:
        super().__init__(shared)
        self._shared = shared

    def step(self) -> list[Completion]:
        return self._shared.take_arrived()


class SharedGrader:
    """Implements Grader for training. `num_pending` counts the responses of both users."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._mine: list[GradedResponse] = []
        self._arrived: list[GradedResponse] = []  # answers to the evaluation

    @property
    def num_pending(self) -> int:
        return self._grader.num_pending + len(self._mine) + len(self._arrived)

    def submit(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> None:
        self._grader.submit(rollout_id, problem, responses)

    def submit_group(self, rollout_ids: Sequence[RolloutId], problem: Problem, responses: Sequence[str]) -> None:
        self._grader.submit_group(rollout_ids, problem, responses)

    def results(self, timeout_s: float = 0.0) -> list[GradedResponse]:
        self._collect(0.0 if self._mine else timeout_s)
        mine, self._mine = self._mine, []
        return mine

    def take_arrived(self, timeout_s: float) -> list[GradedResponse]:
        """Return the answers to the evaluation since the last call; wait up to `timeout_s` for an answer."""
        self._collect(0.0 if self._arrived else timeout_s)
        arrived, self._arrived = self._arrived, []
        return arrived

    def _collect(self, timeout_s: float) -> None:
        for answer in self._grader.results(timeout_s):
            (self._arrived if _is_evaluation(answer.rollout_id) else self._mine).append(answer)


class EvaluationGrader:
    """Implements Grader for an evaluation beside training."""

    def __init__(self, shared: SharedGrader) -> None:
        self._shared = shared

    @property
    def num_pending(self) -> int:
        return self._shared.num_pending

    def submit(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> None:
        self._shared.submit(rollout_id, problem, responses)

    def submit_group(self, rollout_ids: Sequence[RolloutId], problem: Problem, responses: Sequence[str]) -> None:
        self._shared.submit_group(rollout_ids, problem, responses)

    def results(self, timeout_s: float = 0.0) -> list[GradedResponse]:
        return self._shared.take_arrived(timeout_s)


class Shares:
    """The generator and the grader of each user."""

    def __init__(self, generator: Generator, grader: Grader) -> None:
        self.generator, self.grader = SharedGenerator(generator), SharedGrader(grader)
        self.evaluation_generator = EvaluationGenerator(self.generator)
        self.evaluation_grader = EvaluationGrader(self.grader)


def _is_evaluation(rollout_id: RolloutId) -> bool:
    return rollout_id >= FIRST_EVALUATION_ID
