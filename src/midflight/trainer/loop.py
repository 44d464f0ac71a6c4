"""The training loop: one batch, one optimizer step, new weights, one line of metrics.

consumes       batch k from the stream, with weights of version k
waits for      the actor to append that batch
unblocked by   the append; a stop request is seen within WAIT_SLICE_S
makes wait     nobody: publishing weights never waits for an engine

Every rank runs it. All do the same in the same order, on their own shares of a batch; rank 0 alone decides what is
next, and writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from midflight.errors import NonFiniteLossError
from midflight.losses.denominators import BatchCounts
from midflight.losses.inputs import LossInputs, LossOutput
from midflight.losses.objective import Objective
from midflight.metrics.jsonl import JsonlWriter
from midflight.metrics.lag import lag_metrics, merge_histograms
from midflight.metrics.lengths import length_ks
from midflight.metrics.policy import Metrics, PolicyMetrics
from midflight.protocols import PolicyOutputs, Stream, TrainerBackend
from midflight.tracing.spans import Tracer
from midflight.trainer.checkpoints import TrainerState, checkpoint_of, oldest_checkpoint_version, save_checkpoint
from midflight.trainer.inputs import loss_inputs, token_origins
from midflight.trainer.peak_memory import peak_memory_bytes
from midflight.trainer.ranks import OneRank, Ranks
from midflight.trainer.shares import ShareResult, of_all_ranks, share_of
from midflight.types import Int32Array, Microbatch, TrainingBatch

WAIT_SLICE_S = 0.2
_ONE_RANK = OneRank()
_PATIENCE_S = 60.0  # with a batch that rank 0 has seen


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


class TrainLoop:
    def __init__(
        self,
        settings: LoopSettings,
        backend: TrainerBackend,
        objective: Objective,
        batches: Stream[TrainingBatch],
        metrics: JsonlWriter | None,
        tracer: Tracer,
        state: TrainerState,
        encode_batch: Callable[[TrainingBatch], bytes],
        ranks: Ranks = _ONE_RANK,
        device: torch.device | str = "cpu",
    ) -> None:
        """`metrics`: of rank 0 only. `device`: whose peak memory is measured."""
        self._settings = settings
        self._backend = backend
        self._objective = objective
        self._batches = batches
        self._metrics = metrics
        self._tracer = tracer
        self._state = state
        self._encode_batch = encode_batch
        self._ranks, self._device = ranks, torch.device(device)
        self._skipped_in_a_row = 0
        self._seen = _Seen()

    @property
    def _is_first(self) -> bool:
        return self._ranks.rank == 0

    @property
    def state(self) -> TrainerState:
        return self._state

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Train until the last step, the time limit or a stop request; ends with a checkpoint either way.

        Raises: NonFiniteLossError after too many skipped steps in a row; CheckpointError.
        """
        started = time.monotonic() - self._state.wall_s
        self._seen = _Seen(wall_s=self._state.wall_s, trained_tokens=self._state.trained_tokens)
        while (found := self._next(should_stop)) is not None:
            for batch in found:
                self._train_on(batch, started)
                if self._state.version % self._settings.checkpoint_every == 0:
                    self._checkpoint()
        self._checkpoint()

    def _next(self, should_stop: Callable[[], bool]) -> list[TrainingBatch] | None:
        """The next batch, nothing if there is none yet, None at the end of training: as rank 0 finds."""
        with self._tracer.span("wait"):
            asked_to_stop = should_stop()  # every rank asks: that is its heartbeat
            found = self._find(asked_to_stop) if self._is_first else []
            num_found = self._ranks.agree(-1 if found is None else len(found))
            if num_found < 0:
                return None
            return self._read(timeout_s=_PATIENCE_S) if num_found and not found else found

    def _find(self, asked_to_stop: bool) -> list[TrainingBatch] | None:
        settings, state = self._settings, self._state
        out_of_time = settings.max_seconds is not None and state.wall_s >= settings.max_seconds
        if state.version >= settings.max_steps or out_of_time or asked_to_stop:
            return None
        return self._read(timeout_s=WAIT_SLICE_S)

    def _read(self, timeout_s: float) -> list[TrainingBatch]:
        return self._batches.read(self._state.version, max_records=1, timeout_s=timeout_s)

    def _train_on(self, batch: TrainingBatch, started: float) -> None:
        state = self._state
        assert batch.index == state.version, f"batch {batch.index} reached version {state.version}"
        with self._tracer.span("train", version=state.version):
            own, stats = self._step(batch)
            loss, policy, peak_memory = of_all_ranks(own, self._ranks)
        state.version += 1
        with self._tracer.span("publish"):
            self._backend.publish_weights(state.version)
        state.wall_s = time.monotonic() - started
        measured = policy.result()
        self._count(batch, measured, bool(stats["skipped"]))
        memory: Metrics = {
            "memory/peak_bytes": max(peak_memory),
            "memory/peak_bytes_by_rank": [*map(float, peak_memory)],
        }
        line = self._line(batch, {"loss": loss, **stats, **measured, **memory})
        if self._metrics is not None:
            self._metrics.write(line)
        self._stop_if_hopeless(batch, bool(stats["skipped"]))

    def _step(self, batch: TrainingBatch) -> tuple[ShareResult, dict[str, float]]:
        backend, objective = self._backend, self._objective
        renewed = objective.proximal_every is None or batch.index % objective.proximal_every == 0
        if renewed and objective.proximal_every not in (None, 1):
            backend.remember_proximal()
        policy = PolicyMetrics(objective.max_ratio)
        share = share_of(batch, self._ranks.rank, self._ranks.num_ranks)
        total = 0.0
        for microbatch in share.microbatches:
            outputs, inputs, output = self._forward(microbatch, batch, renewed)
            backend.backward(output.loss)
            origins = token_origins(microbatch, batch.index)
            policy.add(origins, outputs.logprobs, inputs.behavior_logprobs, outputs.entropy, output.token_metrics)
            total += float(output.loss.detach())
        for microbatch in share.fillers:
            _, _, output = self._forward(microbatch, batch, renewed)
            backend.backward(output.loss * 0.0)
        learning_rate = self._settings.learning_rate(batch.index)
        stats = {"learning_rate": learning_rate, **backend.optimizer_step(learning_rate)}
        return ShareResult(total, policy.counted(), peak_memory_bytes(self._device)), stats

    def _forward(
        self, microbatch: Microbatch, batch: TrainingBatch, renewed: bool
    ) -> tuple[PolicyOutputs, LossInputs, LossOutput]:
        """`renewed`: the proximal policy is the one in training."""
        backend, objective = self._backend, self._objective
        counts = BatchCounts(batch.num_loss_tokens, batch.num_rollouts, objective.max_response_tokens)
        proximal = None if renewed else backend.forward_proximal(microbatch)
        outputs = backend.forward(microbatch)
        inputs = loss_inputs(microbatch, outputs, proximal, counts, objective)
        return outputs, inputs, objective(inputs)

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
            "length/by_rollout": batch.trained_lengths.tolist(),
            "has_gradient/by_rollout": batch.has_gradient.astype(int).tolist(),
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
        path = self._settings.rejected_batches / f"batch_{batch.index}.msgpack"
        if self._is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._encode_batch(batch))
        self._checkpoint()
        raise NonFiniteLossError(
            f"{self._skipped_in_a_row} steps in a row had a loss or gradient that is not finite; none of them changed"
            f" the weights. The last batch is in {path}"
        )

    def _checkpoint(self) -> None:
        settings = self._settings
        with self._tracer.span("checkpoint"):
            if self._ranks.agree(checkpoint_of(settings.checkpoints, self._state.version).exists()):
                return
            if not self._is_first:
                self._backend.save(settings.checkpoints)
                return
            save_checkpoint(settings.checkpoints, self._state, self._backend.save, settings.keep_checkpoints)
        # A restart may go back to any checkpoint that is kept; and the actor goes on after the last batch there is.
        self._batches.trim(oldest_checkpoint_version(settings.checkpoints) - 1)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Running totals at the last metrics line."""

    wall_s: float = 0.0
    trained_tokens: int = 0
    wait_s: float = 0.0


def _count_values(histogram: dict[int, int], values: Int32Array) -> None:
    for value in values.tolist():
        histogram[value] = histogram.get(value, 0) + 1
