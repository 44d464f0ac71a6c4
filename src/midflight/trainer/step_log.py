"""One metrics line per optimizer step: metrics of the batch and the step, and rates since the previous line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from midflight.metrics.lag import lag_metrics
from midflight.metrics.lengths import length_ks
from midflight.protocols import MetricsSink
from midflight.tracing.spans import Tracer
from midflight.trainer.state import TrainerState
from midflight.trainer.step import StepResult
from midflight.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class _Totals:
    """Running totals at one metrics line."""

    wall_s: float
    trained_tokens: int
    wait_s: float
    sent_bytes: int


class StepLog:
    """Writer of the metrics line of every optimizer step. Only rank 0 has a sink and writes."""

    def __init__(
        self, writer: MetricsSink | None, tracer: Tracer, state: TrainerState, sent_bytes: Callable[[], int]
    ) -> None:
        """`sent_bytes`: total of the weight sender."""
        self._writer, self._tracer, self._sent_bytes = writer, tracer, sent_bytes
        self._last = self._totals(state)

    def write(self, batch: TrainingBatch, step: StepResult, state: TrainerState, num_waiting_batches: int) -> None:
        """Write one line. `state`: the totals after the step."""
        if self._writer is None:
            return
        last, now = self._last, self._totals(state)
        elapsed_s = max(now.wall_s - last.wall_s, 1e-9)
        line: dict[str, object] = {
            "version": state.version,
            "wall_s": state.wall_s,
            "samples": state.samples,
            **batch.metrics,
            **lag_metrics(batch.lag_histogram),
            "lag/by_position": batch.lag_by_position.tolist(),
            "length/by_rollout": batch.trained_lengths.tolist(),
            "has_gradient/by_rollout": batch.has_gradient.astype(int).tolist(),
            "bias/length_ks": length_ks(state.generated_lengths, state.trained_lengths),
            "loss": step.loss,
            "learning_rate": step.learning_rate,
            "grad_norm": step.grad_norm,
            "skipped": float(step.skipped),
            **step.policy.result(),
            "memory/peak_bytes": max(step.peak_memory_bytes),
            "memory/peak_bytes_by_rank": [*map(float, step.peak_memory_bytes)],
            "throughput/trained_tokens_per_s": (now.trained_tokens - last.trained_tokens) / elapsed_s,
            "idle/trainer_fraction": min(1.0, (now.wait_s - last.wait_s) / elapsed_s),
            "time/step_s": elapsed_s,
            "queue/batches": num_waiting_batches,
            "update/bytes": float(now.sent_bytes - last.sent_bytes),
        }
        self._writer.write(line)
        self._last = now

    def _totals(self, state: TrainerState) -> _Totals:
        return _Totals(state.wall_s, state.trained_tokens, self._tracer.total_s("wait"), self._sent_bytes())
