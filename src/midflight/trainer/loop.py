"""The training loop: one batch, one optimizer step, new weights, one line of metrics.

consumes       batch k from the stream, with weights of version k
waits for      the actor to append that batch
unblocked by   the append; a stop request is seen within WAIT_SLICE_S
makes wait     nobody: publishing weights never waits for an engine
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from midflight.errors import NonFiniteLossError
from midflight.losses.denominators import BatchCounts
from midflight.losses.objective import Objective
from midflight.metrics.jsonl import JsonlWriter
from midflight.metrics.lag import lag_metrics, merge_histograms
from midflight.metrics.lengths import length_ks
from midflight.metrics.policy import Metrics, PolicyMetrics
from midflight.protocols import Stream, TrainerBackend
from midflight.tracing.spans import Tracer
from midflight.trainer.checkpoints import TrainerState, oldest_checkpoint_version, save_checkpoint
from midflight.trainer.inputs import loss_inputs, token_origins
from midflight.types import Int32Array, TrainingBatch

WAIT_SLICE_S = 0.2


@dataclass(frozen=True, slots=True)
class LoopSettings:
    max_steps: int
    max_seconds: float | None
    checkpoint_every: int  # optimizer steps
    keep_checkpoints: int
    max_nonfinite_steps: int  # in a row
    learning_rate: Callable[[int], float]  # of each optimizer step
    checkpoints: Path
    rejected_batches: Path  # where the batch behind a stop for non-finite losses is kept
    rank: int = 0  # which of the batch's shares is trained on here


class TrainLoop:
    def __init__(
        self,
        settings: LoopSettings,
        backend: TrainerBackend,
        objective: Objective,
        batches: Stream[TrainingBatch],
        metrics: JsonlWriter,
        tracer: Tracer,
        state: TrainerState,
        encode_batch: Callable[[TrainingBatch], bytes],
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._objective = objective
        self._batches = batches
        self._metrics = metrics
        self._tracer = tracer
        self._state = state
        self._encode_batch = encode_batch
        self._skipped_in_a_row = 0
        self._seen = _Seen()

    @property
    def state(self) -> TrainerState:
        return self._state

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Train until the last step, the time limit or a stop request; ends with a checkpoint either way.

        Raises: NonFiniteLossError after too many skipped steps in a row; CheckpointError.
        """
        started = time.monotonic() - self._state.wall_s
        self._seen = _Seen(wall_s=self._state.wall_s, trained_tokens=self._state.trained_tokens)
        while self._state.version < self._settings.max_steps and not should_stop():
            if self._settings.max_seconds is not None and self._state.wall_s >= self._settings.max_seconds:
                break
            with self._tracer.span("wait"):
                records = self._batches.read(self._state.version, max_records=1, timeout_s=WAIT_SLICE_S)
            if records:
                self._train_on(records[0], started)
                if self._state.version % self._settings.checkpoint_every == 0:
                    self._checkpoint()
        self._checkpoint()

    def _train_on(self, batch: TrainingBatch, started: float) -> None:
        state = self._state
        assert batch.index == state.version, f"batch {batch.index} reached version {state.version}"
        policy = PolicyMetrics(self._objective.max_ratio)
        with self._tracer.span("train", version=state.version):
            loss, stats = self._step(batch, policy)
        state.version += 1
        with self._tracer.span("publish"):
            self._backend.publish_weights(state.version)
        state.wall_s = time.monotonic() - started
        measured = policy.result()
        self._count(batch, measured, bool(stats["skipped"]))
        self._metrics.write(self._line(batch, {"loss": loss, **stats, **measured}))
        self._stop_if_hopeless(batch, bool(stats["skipped"]))

    def _step(self, batch: TrainingBatch, policy: PolicyMetrics) -> tuple[float, dict[str, float]]:
        backend, objective = self._backend, self._objective
        counts = BatchCounts(batch.num_loss_tokens, batch.num_rollouts, objective.max_response_tokens)
        renewed = objective.proximal_every is None or batch.index % objective.proximal_every == 0
        if renewed and objective.proximal_every not in (None, 1):
            backend.remember_proximal()
        total = 0.0
        for microbatch in batch.microbatches[self._settings.rank]:
            proximal = None if renewed else backend.forward_proximal(microbatch)
            outputs = backend.forward(microbatch)
            inputs = loss_inputs(microbatch, outputs, proximal, counts, objective)
            output = objective(inputs)
            backend.backward(output.loss)
            origins = token_origins(microbatch, batch.index)
            policy.add(origins, outputs.logprobs, inputs.behavior_logprobs, outputs.entropy, output.token_metrics)
            total += float(output.loss.detach())
        learning_rate = self._settings.learning_rate(batch.index)
        return total, {"learning_rate": learning_rate, **backend.optimizer_step(learning_rate)}

    def _count(self, batch: TrainingBatch, policy: Metrics, skipped: bool) -> None:
        state = self._state
        state.samples += batch.num_rollouts
        state.trained_tokens += batch.num_response_tokens
        state.trained_groups += len(batch.group_ids)
        state.skipped_steps += skipped
        state.lag_histogram = merge_histograms([state.lag_histogram, batch.lag_histogram])
        _count_values(state.generated_lengths, batch.generated_lengths)
        _count_values(state.trained_lengths, batch.trained_lengths)
        _count_values(state.dropped_lengths, batch.dropped_lengths)
        state.rollout_s += batch.metrics["time/rollout_s"]
        state.carried_tokens += batch.metrics["carried_token_fraction"] * batch.num_response_tokens
        most_versions = int(batch.metrics["versions_per_rollout/max"])
        state.versions_per_rollout_max = max(state.versions_per_rollout_max, most_versions)
        state.actor = batch.actor_state
        ess = policy.get("ess")
        if isinstance(ess, float) and math.isfinite(ess):
            state.ess_sum += ess
            state.ess_steps += 1

    def _line(self, batch: TrainingBatch, step: Metrics) -> dict[str, object]:
        state = self._state
        now = _Seen(
            wall_s=state.wall_s,
            trained_tokens=state.trained_tokens,
            wait_s=self._tracer.total_s("wait"),
        )
        elapsed = max(now.wall_s - self._seen.wall_s, 1e-9)
        line: dict[str, object] = {
            "version": state.version,
            "wall_s": state.wall_s,
            "samples": state.samples,
            **batch.metrics,
            **lag_metrics(batch.lag_histogram),
            "lag/by_position": batch.lag_by_position.tolist(),
            "bias/length_ks": length_ks(state.generated_lengths, state.trained_lengths),
            **step,
            "throughput/trained_tokens_per_s": (now.trained_tokens - self._seen.trained_tokens) / elapsed,
            "idle/trainer_fraction": min(1.0, (now.wait_s - self._seen.wait_s) / elapsed),
            "time/step_s": elapsed,
            "queue/batches": self._batches.next_offset() - state.version,
        }
        self._seen = now
        return line

    def _stop_if_hopeless(self, batch: TrainingBatch, skipped: bool) -> None:
        if not any(batch.microbatches):
            return  # nothing to learn from it, and nothing learned about the policy
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row < self._settings.max_nonfinite_steps:
            return
        self._settings.rejected_batches.mkdir(parents=True, exist_ok=True)
        path = self._settings.rejected_batches / f"batch_{batch.index}.msgpack"
        path.write_bytes(self._encode_batch(batch))
        self._checkpoint()
        raise NonFiniteLossError(
            f"{self._skipped_in_a_row} steps in a row had a loss or gradient that is not finite; none of them changed"
            f" the weights. The last batch is in {path}"
        )

    def _checkpoint(self) -> None:
        with self._tracer.span("checkpoint"):
            save_checkpoint(
                self._settings.checkpoints, self._state, self._backend.save, self._settings.keep_checkpoints
            )
        # A restart may go back to any checkpoint that is kept; and the actor goes on after the last batch there is.
        self._batches.trim(oldest_checkpoint_version(self._settings.checkpoints) - 1)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Running totals at the last metrics line."""

    wall_s: float = 0.0
    trained_tokens: int = 0
    wait_s: float = 0.0


def _count_values(histogram: dict[int, int], values: Int32Array) -> None:
    for value in values.tolist():
        histogram[value] = histogram.get(value, 0) + 1
