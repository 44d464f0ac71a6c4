"""Evaluations during a run, by the run's own engines, beside the training rollouts.

An evaluation is of one weight version v, a multiple of `every`:

1. The rollout loop holds back batch v, which makes version v + 1, until the engines have adopted version v.
2. All requests are added after that, and the loop adopts no newer weights before the last answer is graded. So every
   token is sampled by version v, with the random numbers that `midflight eval` uses for checkpoint v.
3. Training rollouts go on in their own slots, the trainer goes on with the batches it gets.

If the engines still answer for v when the next multiple is due, training goes on and that multiple is left out.
An evaluation that ends early, because the process is stopped or killed, leaves no result. A restarted process evaluates
again if its engines still have that version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from midflight.evals.answering import Answering, Evaluator
from midflight.evals.evaluate import Evaluation, EvaluationPlan, evaluation_of
from midflight.metrics.evaluations import metrics_of

logger = logging.getLogger(__name__)

Report = Callable[[int, dict[str, Any]], object]


class EvaluationDuringRun:
    """Implements actor.loop.SideEvaluation."""

    def __init__(
        self,
        evaluator: Evaluator,
        plan: EvaluationPlan,
        every: int,
        newest_evaluated: int,
        report: Report,
    ) -> None:
        """Start with no evaluation.

        `newest_evaluated`: version of the newest result; 0: none. `report`: gets the version and the result of each
        evaluation, as in evaluations.jsonl.
        """
        self._evaluator, self._plan, self._every, self._report = evaluator, plan, every, report
        self._newest_evaluated = newest_evaluated
        self._answering: Answering | None = None
        self._version, self._started_s = 0, 0.0
        self._finished: dict[str, float] = {}  # metrics since the last `take_metrics`
        self._num_counted = 0  # tokens of the current evaluation that `take_metrics` has returned
        self._num_uncounted = 0  # tokens of ended evaluations that it has not returned
        self.num_generated = 0  # tokens of all ended evaluations, complete or not

    @property
    def is_running(self) -> bool:
        return self._answering is not None

    @property
    def is_generating(self) -> bool:
        return self._answering is not None and self._answering.is_generating

    def is_due_at(self, version: int) -> bool:
        return version > self._newest_evaluated and version % self._every == 0

    def step(self, version: int, timeout_s: float = 0.0) -> None:
        """Begin an evaluation if one is due at the engines' version; else continue the current one."""
        if self._answering is None and self.is_due_at(version):
            self._answering = Answering(self._evaluator, self._plan.question_sets)
            self._version, self._started_s = version, time.monotonic()
        if self._answering is None:
            return
        self._answering.step(timeout_s)
        if self._answering.is_done:
            self._finish(self._answering)

    def stop(self) -> None:
        """Abort the current evaluation; it leaves no result."""
        if self._answering is not None:
            self._answering.stop()
            self._end(self._answering)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: tokens, and the figures of an evaluation that has ended."""
        num_now = self._answering.num_generated if self._answering else 0
        metrics = {"eval/generated_tokens": float(self._num_uncounted + num_now - self._num_counted), **self._finished}
        self._num_counted, self._num_uncounted, self._finished = num_now, 0, {}
        return metrics

    def _finish(self, answering: Answering) -> None:
        assert answering.weight_versions <= {self._version}, (
            f"version {self._version} was evaluated with tokens of {answering.weight_versions}"
        )
        evaluation = evaluation_of(self._plan, answering.tables)
        line = during_run_line(evaluation, answering.num_generated, time.monotonic() - self._started_s)
        self._report(self._version, line)
        self._newest_evaluated = self._version
        self._finished = {"eval/version": float(self._version), **metrics_of(line)}
        self._end(answering)

    def _end(self, answering: Answering) -> None:
        self.num_generated += answering.num_generated
        self._num_uncounted += answering.num_generated - self._num_counted
        self._num_counted, self._answering = 0, None


def during_run_line(evaluation: Evaluation, num_generated: int, seconds: float) -> dict[str, Any]:
    """Return the line of evaluations.jsonl, without its version."""
    return {"when": "during", "seconds": seconds, "generated_tokens": num_generated, **evaluation.to_json()}
