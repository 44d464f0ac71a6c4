"""Trainer backend on several ranks with DeepSpeed: ZeRO-2 shards gradients, masters and moments; ZeRO-3 also weights.

Checkpoints have the format of a single process, not DeepSpeed's, so a run can resume with another backend or number of
ranks.
"""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midflight.errors import MissingExtraError
from midflight.models.loading import Named, saved_buffers_of
from midflight.models.policy import PackedPolicy
from midflight.protocols import OptimizerStep, PolicyOutputs, WeightSender
from midflight.trainer.full_tensors import DEFAULT_BUCKET_BYTES, in_buckets
from midflight.trainer.policies import PLAIN_POLICY, PolicySettings, build_policy
from midflight.trainer.precision import ComputedPolicy
from midflight.trainer.saved_tensors import (
    MASTERS,
    MODEL,
    OPTIMIZER,
    PROXIMAL,
    VALUE_HEAD,
    SavedTensors,
    save_on_first_rank,
    stem_of_masters,
)
from midflight.trainer.single import OptimizerSettings, SingleProcessTrainer
from midflight.types import Microbatch, TensorSpec
from midflight.weights.specs import dtype_name

_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), "step"


class DeepSpeedTrainer(SingleProcessTrainer):
    """Trainer backend with DeepSpeed; all ranks call the same methods in the same order. Implements TrainerBackend.

    With ZeRO-2 each rank has a full proximal policy. With ZeRO-3 a proximal policy is not supported.
    """

    def __init__(
        self,
        model_path: Path,
        optimizer: OptimizerSettings,
        sender: WeightSender,
        num_ranks: int,
        zero_stage: int,
        policy: PolicySettings = PLAIN_POLICY,
        device: torch.device | str = "cpu",
    ) -> None:
        """Check that DeepSpeed is installed. Raises: MissingExtraError without the package deepspeed."""
        super().__init__(model_path, optimizer, sender, policy, device)
        self._num_ranks, self._zero_stage = num_ranks, zero_stage
        self._deepspeed = _import_deepspeed(self._device.type)
        self._has_gradients = False

    def init(self, rank: int) -> None:
        """Load the model and announce the specs of its published weights."""
        super().init(rank)
        self._published = dict(self.model.named_parameters())
        # With ZeRO-3 a rank's parameters are empty between uses.
        self._shapes: dict[Tensor, tuple[int, ...]] = {
            parameter: tuple(parameter.shape) for parameter in self._trained.values()
        }
        trained = self._trained.values()
        unrounded = [parameter.detach().clone() for parameter in trained] if self._is_rounded else []
        os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed asks torch.distributed for everything else
        self._engine, *_ = self._deepspeed.initialize(
            model=self._policy, optimizer=self._optimizer, config=self._deepspeed_config()
        )
        if self._zero_stage == 3:
            self._register_head()
        self._make_moments()
        for parameter, full in zip(trained, unrounded, strict=False):
            self._set(parameter, full)

    def _build_policy(self) -> PackedPolicy:
        return build_policy(self._model_path, self._policy_settings).to(self._device)

    def _computed_policy(self) -> ComputedPolicy:
        return ComputedPolicy(self._policy, torch.float32)  # DeepSpeed holds the masters

    @property
    def _is_rounded(self) -> bool:
        """True if masters are more precise than the parameters in the forward pass."""
        return self._policy_settings.dtype != torch.float32

    def _deepspeed_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            # step() ends an accumulation of any number of passes.
            "managed_gradient_accumulation": False,
            "gradient_clipping": self._optimizer_settings.max_grad_norm,
            "bf16": {"enabled": self._is_rounded},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": self._zero_stage,
                "stage3_param_persistence_threshold": 0,  # shard small parameters, too
                # DeepSpeed's linear layer rounds before it adds the bias; engines do not.
                "memory_efficient_linear": False,
            },
        }

    def _register_head(self) -> None:
        """Declare the output head's weights, which the policy uses without the head's forward pass."""
        for parameter in self.model.get_output_embeddings().parameters():
            self._deepspeed.zero.register_external_parameter(self._policy, parameter)

    def _make_moments(self) -> None:
        """Run one step with zero gradient, uncounted, because AdamW creates its moments in its first step."""
        outputs = self.forward(_two_tokens())
        total = outputs.logprobs.sum() if outputs.values is None else outputs.logprobs.sum() + outputs.values.sum()
        self.backward(0.0 * total)
        self.optimizer_step(0.0)
        self._set_num_steps(0.0)

    def forward(self, microbatch: Microbatch) -> PolicyOutputs:
        scores, values = self._engine(microbatch)
        return PolicyOutputs(scores.logprobs, scores.entropy, values)

    def remember_proximal(self) -> None:
        assert self._zero_stage == 2, "with ZeRO-3 no rank has the full policy"
        super().remember_proximal()

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, but losses already have the denominator of the whole batch.
        self._engine.backward(loss * self._num_ranks, scale_wrt_gas=False)
        self._has_gradients = True

    def optimizer_step(self, learning_rate: float) -> OptimizerStep:
        """Clip, step and clear the gradients. A gradient that is not finite changes nothing."""
        if not self._has_gradients:
            return OptimizerStep(grad_norm=0.0, skipped=False, changed=False)
        self._has_gradients = False
        self._set_learning_rate(learning_rate)
        self._engine.step()
        applied = self._engine.was_step_applied()
        grad_norm = float(self._engine.get_global_grad_norm())
        return OptimizerStep(grad_norm, skipped=not applied, changed=applied and learning_rate > 0)

    def _published_weights(self) -> Iterator[Named]:
        def num_bytes(parameter: Tensor) -> int:
            """Size of the full parameter (bytes); a rank may hold no part."""
            return math.prod(self._shapes[parameter]) * parameter.itemsize

        for bucket in in_buckets(self._published.items(), DEFAULT_BUCKET_BYTES, num_bytes):
            with self._deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach().to(self._policy_settings.dtype)

    def save(self, directory: Path) -> None:
        """Write the files of a single process, from the masters."""
        dtype, specs = self._policy_settings.checkpoint_dtype, self._specs(self._published)
        if dtype is not torch.float32:
            save_on_first_rank(self._rank, directory, MASTERS, specs, self._masters(self._published))
        rounded = ((name, master.to(dtype)) for name, master in self._masters(self._published))
        self._save_model(directory, rounded, [replace(spec, dtype=dtype_name(dtype)) for spec in specs])
        save_on_first_rank(self._rank, directory, OPTIMIZER, *self._states())
        if self._policy.value_head is not None:
            head = dict(self._policy.value_head.named_parameters())
            save_on_first_rank(self._rank, directory, VALUE_HEAD, self._specs(head), self._masters(head))
        if self._proximal is not None:
            self._save(directory, PROXIMAL, self._proximal)

    def _masters(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[Named]:
        for name, parameter in parameters.items():
            yield name, self._deepspeed.utils.safe_get_full_fp32_param(parameter)

    def _states(self) -> tuple[list[TensorSpec], Iterator[Named]]:
        """States of AdamW by parameter; DeepSpeed has one step count for all parameters."""
        (num_steps, *_) = (state[_STEP].cpu() for state in self._optimizer.state.values())
        specs = []
        for name, parameter in self._trained.items():
            specs.append(TensorSpec(f"{_STEP}.{name}", (), "float32"))
            specs += self._specs({f"{moment}.{name}": parameter for moment in _MOMENTS})

        def states() -> Iterator[Named]:
            for name, parameter in self._trained.items():
                yield f"{_STEP}.{name}", num_steps.clone()  # safetensors saves no shared storage
                for moment in _MOMENTS:
                    full = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, moment)
                    yield f"{moment}.{name}", full

        return specs, states()

    def load(self, directory: Path) -> None:
        """Load a checkpoint of any backend and any number of ranks."""
        with SavedTensors(directory, MODEL) as saved:
            for name, buffer in saved_buffers_of(self.model).items():
                saved.fill(buffer, name)
        with SavedTensors(directory, stem_of_masters(directory)) as saved:
            self._load_masters(saved, self._published)
        if self._policy.value_head is not None:
            with SavedTensors(directory, VALUE_HEAD) as saved:
                self._load_masters(saved, dict(self._policy.value_head.named_parameters()))
        with SavedTensors(directory, OPTIMIZER) as saved:
            steps = [float(saved.read(name)) for name in saved.names if name.startswith(f"{_STEP}.")]
            self._set_num_steps(max(steps, default=0.0))
            for name, parameter in self._trained.items():
                for moment in _MOMENTS:
                    full = torch.zeros(self._shapes[parameter], device=self._device)
                    if (key := f"{moment}.{name}") in saved.names:
                        saved.fill(full, key)
                    self._set(parameter, full, moment)
        self._load_proximal(directory)

    def _load_masters(self, saved: SavedTensors, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            full = torch.empty(self._shapes[parameter], device=self._device)
            saved.fill(full, name)
            self._set(parameter, full)
            with torch.no_grad(), self._deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(full)

    def _set(self, parameter: nn.Parameter, full: Tensor, *moment: str) -> None:
        """Set the master or one of its moments; the parameter in the forward pass does not change."""
        access = self._deepspeed.utils
        if self._zero_stage == 3:
            # The accessors of full tensors support only tensors that divide equally among ranks.
            size = -(-full.numel() // self._num_ranks)
            padded = F.pad(full.flatten(), (0, size * self._num_ranks - full.numel()))
            full = padded[self._rank * size : (self._rank + 1) * size]
            set_moment, set_master = access.safe_set_local_optimizer_state, access.safe_set_local_fp32_param
        else:
            set_moment, set_master = access.safe_set_full_optimizer_state, access.safe_set_full_fp32_param
        (set_moment if moment else set_master)(parameter, full, *moment)

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def _set_num_steps(self, num_steps: float) -> None:
        for state in self._optimizer.state.values():
            state[_STEP].fill_(num_steps)

    def _specs(self, parameters: Mapping[str, nn.Parameter]) -> list[TensorSpec]:
        """Specs of the masters."""
        return [TensorSpec(name, self._shapes[parameter], "float32") for name, parameter in parameters.items()]


def _two_tokens() -> Microbatch:
    """Smallest microbatch: one sequence of two tokens."""
    zero, zeros = np.zeros(1, np.int32), np.zeros(2, np.int32)
    floats = np.zeros(2, np.float32)
    return Microbatch(
        token_ids=zeros,
        position_ids=np.arange(2, dtype=np.int32),
        loss_mask=np.array([False, True]),
        behavior_logprobs=floats,
        weight_versions=zeros,
        advantages=floats,
        ref_logprobs=None,
        sequence_lengths=np.array([2], np.int32),
        prefix_starts=zero,
        prefix_lengths=zero,
        rewards=np.zeros(1, np.float32),
        first_versions=zero,
    )


def is_installed() -> bool:
    """Return True if the package deepspeed is installed, without importing it, which takes seconds."""
    return importlib.util.find_spec("deepspeed") is not None


def _import_deepspeed(device_type: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # by default DeepSpeed uses a GPU if there is one
    try:
        import deepspeed
        import deepspeed.utils
    except ImportError as error:
        raise MissingExtraError("deepspeed", "deepspeed") from error
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # one per collective
    # On CPUs DeepSpeed would compile an operator for inference only, with a compiler that may be missing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
