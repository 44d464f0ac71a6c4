"""One optimizer step: forward, loss, backward and optimizer. Every rank runs it for every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from midflight.losses.denominators import BatchCounts
from midflight.losses.inputs import LossInputs, LossOutput
from midflight.losses.objective import Objective
from midflight.metrics.policy import PolicyMetrics, PolicySums
from midflight.protocols import PolicyOutputs, TrainerBackend
from midflight.trainer.inputs import loss_inputs, token_origins
from midflight.trainer.local_batch import LocalResult, local_batch_of, reduce_results
from midflight.trainer.peak_memory import peak_memory_bytes
from midflight.trainer.process_group import ProcessGroup, SingleProcessGroup
from midflight.types import Microbatch, TrainingBatch

_SINGLE_PROCESS, _CPU = SingleProcessGroup(), torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measurements of one optimizer step; the loss and the policy metrics are sums over all ranks."""

    loss: float
    learning_rate: float
    grad_norm: float
    skipped: bool  # the loss or its gradient was not finite
    changed: bool  # a weight changed, on any rank
    policy: PolicySums
    peak_memory_bytes: list[int]  # by rank


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Optimizer step as a callable: `step(batch)` trains on one batch. With several ranks it is a collective."""

    backend: TrainerBackend
    objective: Objective
    learning_rate: Callable[[int], float]  # by optimizer step
    group: ProcessGroup = _SINGLE_PROCESS
    device: torch.device = _CPU  # its peak memory is measured

    def __call__(self, batch: TrainingBatch) -> StepResult:
        every = self.objective.proximal_every
        renewed = every is None or batch.index % every == 0
        if renewed and every not in (None, 1):
            self.backend.remember_proximal()
        loss, policy = self._accumulate(batch, renewed)
        learning_rate = self.learning_rate(batch.index)
        updated = self.backend.optimizer_step(learning_rate)
        own = LocalResult(loss, policy, peak_memory_bytes(self.device), updated.changed)
        total, sums, peak_memory, changed = reduce_results(own, self.group)
        return StepResult(total, learning_rate, updated.grad_norm, updated.skipped, changed, sums, peak_memory)

    def _accumulate(self, batch: TrainingBatch, renewed: bool) -> tuple[float, PolicySums]:
        """Accumulate the gradients of the local batch; return its loss and its policy metrics."""
        policy = PolicyMetrics(self.objective.max_ratio)
        local = local_batch_of(batch, self.group.rank, self.group.num_ranks)
        total = 0.0
        for microbatch in local.microbatches:
            outputs, inputs, output = self._forward(microbatch, batch, renewed)
            self.backend.backward(output.loss)
            origins = token_origins(microbatch, batch.index)
            policy.add(origins, outputs.logprobs, inputs.behavior_logprobs, outputs.entropy, output.token_metrics)
            total += float(output.loss.detach())
        for microbatch in local.dummy_microbatches:
            _, _, output = self._forward(microbatch, batch, renewed)
            self.backend.backward(output.loss * 0.0)
        return total, policy.counted()

    def _forward(
        self, microbatch: Microbatch, batch: TrainingBatch, renewed: bool
    ) -> tuple[PolicyOutputs, LossInputs, LossOutput]:
        """Run the forward pass and the loss. `renewed`: the proximal policy equals the policy in training."""
        counts = BatchCounts(batch.num_loss_tokens, batch.num_rollouts, self.objective.max_response_tokens)
        proximal = None if renewed else self.backend.forward_proximal(microbatch)
        outputs = self.backend.forward(microbatch)
        inputs = loss_inputs(microbatch, outputs, proximal, counts, self.objective)
        return outputs, inputs, self.objective(inputs)
