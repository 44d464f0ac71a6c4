"""Two optimizer steps to compare: midflight's trainer, and the usual step without packing.

Suffixes: B rows, L longest row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.train_load import ModelSizes, natural_batches
from midflight.losses.denominators import BatchCounts
from midflight.losses.objective import Objective
from midflight.losses.reinforce import reinforce
from midflight.models.loading import quiet
from midflight.protocols import WeightSender
from midflight.trainer.inputs import loss_inputs
from midflight.trainer.policies import PolicySettings
from midflight.trainer.single import OptimizerSettings, SingleProcessTrainer
from midflight.types import Microbatch, Trajectory
from midflight.weights.null_sender import NullSender

# Small, so that the two models stay comparable over many steps; the speed does not depend on the rate.
_LEARNING_RATE = 1e-6
_OPTIMIZER = OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
_MAX_RATIO = 5.0  # truncation of ratios in `reinforce`, repeated for the padded step


class TrainStep(Protocol):
    """One implementation of an optimizer step."""

    def __call__(self) -> tuple[float, float]:
        """Run forward, loss, backward, clipping and AdamW; return the loss and the gradient norm before clipping."""
        ...


class PackedStep:
    """Optimizer step of TrainLoop, without publishing the weights."""

    def __init__(
        self,
        directory: Path,
        microbatches: Sequence[Microbatch],
        num_rollouts: int,
        dtype: torch.dtype,
        device: str = "cpu",
        sender: WeightSender | None = None,
    ) -> None:
        num_tokens = sum(int(microbatch.loss_mask.sum()) for microbatch in microbatches)
        self._microbatches = microbatches
        self._counts = BatchCounts(num_tokens, num_rollouts, max_response_tokens=1)
        self._objective = Objective(reinforce)
        self.trainer = SingleProcessTrainer(
            directory, _OPTIMIZER, sender or NullSender(), PolicySettings(dtype=dtype), device
        )
        self.trainer.init(rank=0)

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.trainer.model)

    def __call__(self) -> tuple[float, float]:
        loss = self.add_gradients()
        return loss, self.trainer.optimizer_step(_LEARNING_RATE).grad_norm

    def add_gradients(self) -> float:
        """Run the forward and backward passes of all microbatches; return the loss."""
        total = 0.0
        for microbatch in self._microbatches:
            outputs = self.trainer.forward(microbatch)
            inputs = loss_inputs(microbatch, outputs, None, self._counts, self._objective)
            loss = self._objective(inputs).loss
            self.trainer.backward(loss)
            total += float(loss.detach())
        return total


class PaddedStep:
    """Optimizer step of plain transformers: right-padded rows, attention mask, logits of every position, one AdamW.

    Parameters are float32; bfloat16 means autocast.
    """

    def __init__(
        self,
        directory: Path,
        trajectories: Sequence[Trajectory],
        max_tokens: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self._dtype = dtype
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        self.batches = list(natural_batches(lengths, max_tokens))
        self._rows = [_PaddedRows([trajectories[row] for row in rows], device) for rows in self.batches]
        self._num_tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                directory, local_files_only=True, dtype=torch.float32
            )
        self._model.eval().to(device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=_LEARNING_RATE,
            betas=_OPTIMIZER.betas,
            weight_decay=_OPTIMIZER.weight_decay,
            fused=True,
        )

    def __call__(self) -> tuple[float, float]:
        total = 0.0
        for rows in self._rows:
            loss = self._loss(rows)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), _OPTIMIZER.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total, float(norm)

    def _loss(self, rows: _PaddedRows) -> Tensor:
        """Compute truncated importance-weighted REINFORCE, divided by the batch's loss tokens."""
        with torch.autocast(rows.token_ids_BL.device.type, self._dtype, enabled=self._dtype != torch.float32):
            output = self._model(input_ids=rows.token_ids_BL, attention_mask=rows.present_BL, use_cache=False)
        logprobs_BLV = output.logits[:, :-1].float().log_softmax(dim=-1)
        logprobs_BL = logprobs_BLV.gather(2, rows.token_ids_BL[:, 1:, None]).squeeze(2)
        weights_BL = (logprobs_BL - rows.behavior_BL[:, 1:]).detach().exp().clamp(max=_MAX_RATIO)
        terms_BL = weights_BL * rows.advantages_BL[:, 1:] * logprobs_BL * rows.loss_mask_BL[:, 1:]
        loss: Tensor = -terms_BL.sum() / self._num_tokens
        return loss


class _PaddedRows:
    """Trajectories as right-padded rows. Shapes: all [B, L]."""

    def __init__(self, trajectories: Sequence[Trajectory], device: str) -> None:
        def padded(rows: Sequence[Any]) -> Tensor:
            tensors = [torch.from_numpy(row) for row in rows]
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)

        self.token_ids_BL = padded([trajectory.token_ids.astype(np.int64) for trajectory in trajectories])
        self.present_BL = padded([np.ones(len(trajectory.token_ids), np.int64) for trajectory in trajectories])
        self.loss_mask_BL = padded([trajectory.loss_mask for trajectory in trajectories])
        self.behavior_BL = padded([trajectory.behavior_logprobs for trajectory in trajectories])
        self.advantages_BL = padded([trajectory.advantages for trajectory in trajectories])
