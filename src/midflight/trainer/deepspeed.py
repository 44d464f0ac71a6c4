"""The trainer contract on several ranks by DeepSpeed: ZeRO-2 shards gradients, masters and moments, ZeRO-3 weights too.

A checkpoint is the one a single process writes, not DeepSpeed's: a run goes on with another backend or number of ranks.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midflight.errors import MissingExtraError
from midflight.models.loading import Named, load_tokenizer, save_description, saved_buffers_of
from midflight.protocols import OptimizerStep, PolicyOutputs, WeightSender
from midflight.trainer.policies import PLAIN_POLICY, PolicySettings, build_policy
from midflight.trainer.saved_tensors import MODEL, OPTIMIZER, PROXIMAL, VALUE_HEAD, SavedTensors, save_on_first_rank
from midflight.trainer.shards import DEFAULT_BUCKET_BYTES, in_buckets
from midflight.trainer.single import OptimizerSettings
from midflight.types import Microbatch, TensorSpec
from midflight.weights.specs import dtype_name, specs_of

_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), "step"


class DeepSpeedTrainer:
    """Implements TrainerBackend; all ranks call the same methods in the same order.

    Each rank has a whole proximal policy with ZeRO-2; there can be none with ZeRO-3.
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
        """Raises: MissingExtraError without the package deepspeed."""
        self._model_path, self._settings, self._policy_settings = model_path, optimizer, policy
        self._sender, self._device = sender, torch.device(device)
        self._num_ranks, self._zero_stage = num_ranks, zero_stage
        self._deepspeed = _import_deepspeed(self._device.type)
        self._has_gradients = False
        self._proximal: dict[str, Tensor] | None = None

    def init(self, rank: int) -> None:
        """Load the model and announce the weights it will publish."""
        self._rank = rank
        self._tokenizer = load_tokenizer(self._model_path)
        self._policy = build_policy(self._model_path, self._policy_settings).to(self._device)
        self._parameters = dict(self._policy.named_parameters())
        self._published = dict(self._policy.model.named_parameters())
        self._shapes: dict[Tensor, tuple[int, ...]] = {
            parameter: tuple(parameter.shape) for parameter in self._parameters.values()
        }
        unrounded = [each.detach().clone() for each in self._parameters.values()] if self._is_rounded else []
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
            fused=True,
        )
        os.environ["LOCAL_RANK"] = str(rank)  # the rest DeepSpeed asks torch.distributed for
        self._engine, *_ = self._deepspeed.initialize(
            model=self._policy, optimizer=self._optimizer, config=self._deepspeed_config()
        )
        if self._zero_stage == 3:
            self._register_head()
        self._make_moments()
        for parameter, whole in zip(self._parameters.values(), unrounded, strict=False):
            self._set(parameter, whole)
        self._sender.announce(self._specs(self._published, self._policy_settings.dtype))

    @property
    def _is_rounded(self) -> bool:
        """Whether masters are more precise than what is computed with."""
        return self._policy_settings.dtype != torch.float32

    def _deepspeed_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            # step() ends an accumulation, of however many passes there were.
            "managed_gradient_accumulation": False,
            "gradient_clipping": self._settings.max_grad_norm,
            "bf16": {"enabled": self._is_rounded},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": self._zero_stage,
                "stage3_param_persistence_threshold": 0,  # small ones are shared as well
                # It rounds before it adds a bias, which engines do not.
                "memory_efficient_linear": False,
            },
        }

    def _register_head(self) -> None:
        """The policy multiplies by the output head's weights itself, without the head's forward pass."""
        for parameter in self._policy.model.get_output_embeddings().parameters():
            self._deepspeed.zero.register_external_parameter(self._policy, parameter)

    def _make_moments(self) -> None:
        """AdamW makes its moments in its first step: this one changes nothing and does not count."""
        outputs = self.forward(_two_tokens())
        total = outputs.logprobs.sum() if outputs.values is None else outputs.logprobs.sum() + outputs.values.sum()
        self.backward(0.0 * total)
        self.optimizer_step(0.0)
        self._set_num_steps(0.0)

    def forward(self, microbatch: Microbatch) -> PolicyOutputs:
        scores, values = self._engine(microbatch)
        return PolicyOutputs(scores.logprobs, scores.entropy, values)

    def remember_proximal(self) -> None:
        assert self._zero_stage == 2, "no rank has the whole policy"
        self._proximal = None  # frees the one before it first
        self._proximal = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        assert self._proximal is not None, "nothing was remembered"
        scores, values = torch.func.functional_call(self._policy, self._proximal, (microbatch,))
        return PolicyOutputs(scores.logprobs, scores.entropy, values)

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, and losses have the whole batch's denominator.
        self._engine.backward(loss * self._num_ranks, scale_wrt_gas=False)
        self._has_gradients = True

    def optimizer_step(self, learning_rate: float) -> OptimizerStep:
        """Clip, step, and forget the gradients. A gradient that is not finite changes nothing."""
        if not self._has_gradients:
            return OptimizerStep(grad_norm=0.0, skipped=False)
        self._has_gradients = False
        self._set_learning_rate(learning_rate)
        self._engine.step()
        applied = self._engine.was_step_applied()
        return OptimizerStep(float(self._engine.get_global_grad_norm()), skipped=not applied)

    def publish_weights(self, version: int) -> None:
        self._sender.send(version, self._published_weights())

    def _published_weights(self) -> Iterator[Named]:
        def num_bytes(parameter: Tensor) -> int:
            """Of the whole of it; a rank may have no part."""
            return math.prod(self._shapes[parameter]) * parameter.itemsize

        for bucket in in_buckets(self._published.items(), DEFAULT_BUCKET_BYTES, num_bytes):
            with self._deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach().to(self._policy_settings.dtype)

    def save(self, directory: Path) -> None:
        """The files that a single process writes, from the masters."""
        model = self._policy.model
        buffers = saved_buffers_of(model)
        specs = [*self._specs(self._published), *specs_of(buffers)]
        self._save(directory, MODEL, specs, itertools.chain(self._masters(self._published), buffers.items()))
        if self._rank == 0:
            save_description(model, self._tokenizer, directory)
        self._save(directory, OPTIMIZER, *self._states())
        if self._policy.value_head is not None:
            of_head = dict(self._policy.value_head.named_parameters())
            self._save(directory, VALUE_HEAD, self._specs(of_head), self._masters(of_head))
        if self._proximal is not None:
            self._save(directory, PROXIMAL, specs_of(self._proximal), self._proximal.items())

    def _save(self, directory: Path, stem: str, specs: Sequence[TensorSpec], tensors: Iterable[Named]) -> None:
        save_on_first_rank(self._rank, directory, stem, specs, tensors)

    def _masters(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[Named]:
        for name, parameter in parameters.items():
            yield name, self._deepspeed.utils.safe_get_full_fp32_param(parameter)

    def _states(self) -> tuple[list[TensorSpec], Iterator[Named]]:
        """What AdamW keeps of every parameter; DeepSpeed's has one count of steps for all of them."""
        (num_steps, *_) = (state[_STEP].cpu() for state in self._optimizer.state.values())
        specs = []
        for name, parameter in self._parameters.items():
            specs.append(TensorSpec(f"{_STEP}.{name}", (), "float32"))
            specs += self._specs({f"{moment}.{name}": parameter for moment in _MOMENTS})

        def states() -> Iterator[Named]:
            for name, parameter in self._parameters.items():
                yield f"{_STEP}.{name}", num_steps
                for moment in _MOMENTS:
                    whole = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, moment)
                    yield f"{moment}.{name}", whole

        return specs, states()

    def load(self, directory: Path) -> None:
        """What any backend saved, on any number of ranks."""
        with SavedTensors(directory, MODEL) as saved:
            for name, buffer in saved_buffers_of(self._policy.model).items():
                saved.fill(buffer, name)
            self._load_masters(saved, self._published)
        if self._policy.value_head is not None:
            with SavedTensors(directory, VALUE_HEAD) as saved:
                self._load_masters(saved, dict(self._policy.value_head.named_parameters()))
        with SavedTensors(directory, OPTIMIZER) as saved:
            steps = [float(saved.read(name)) for name in saved.names if name.startswith(f"{_STEP}.")]
            self._set_num_steps(max(steps, default=0.0))
            for name, parameter in self._parameters.items():
                for moment in _MOMENTS:
                    whole = torch.zeros(self._shapes[parameter], device=self._device)
                    if (key := f"{moment}.{name}") in saved.names:
                        saved.fill(whole, key)
                    self._set(parameter, whole, moment)
        if any(directory.glob(f"{PROXIMAL}*")):
            self.remember_proximal()
            assert self._proximal is not None
            with SavedTensors(directory, PROXIMAL) as saved:
                for name, tensor in self._proximal.items():
                    saved.fill(tensor, name)

    def _load_masters(self, saved: SavedTensors, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            whole = torch.empty(self._shapes[parameter], device=self._device)
            saved.fill(whole, name)
            self._set(parameter, whole)
            with torch.no_grad(), self._deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(whole)

    def _set(self, parameter: nn.Parameter, whole: Tensor, *moment: str) -> None:
        """The master, or one of its moments; of what computes with it, nothing changes."""
        access = self._deepspeed.utils
        if self._zero_stage == 3:
            # The accessors of whole tensors take only those that can be shared equally.
            size = -(-whole.numel() // self._num_ranks)
            padded = F.pad(whole.flatten(), (0, size * self._num_ranks - whole.numel()))
            whole = padded[self._rank * size : (self._rank + 1) * size]
            set_moment, set_master = access.safe_set_local_optimizer_state, access.safe_set_local_fp32_param
        else:
            set_moment, set_master = access.safe_set_full_optimizer_state, access.safe_set_full_fp32_param
        (set_moment if moment else set_master)(parameter, whole, *moment)

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def _set_num_steps(self, num_steps: float) -> None:
        for state in self._optimizer.state.values():
            state[_STEP].fill_(num_steps)

    def _specs(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype = torch.float32) -> list[TensorSpec]:
        return [TensorSpec(name, self._shapes[each], dtype_name(dtype)) for name, each in parameters.items()]


def _two_tokens() -> Microbatch:
    zero, zeros = np.zeros(1, np.int32), np.zeros(2, np.int32)
    nothing = np.zeros(2, np.float32)
    return Microbatch(
        token_ids=zeros,
        position_ids=np.arange(2, dtype=np.int32),
        loss_mask=np.array([False, True]),
        behavior_logprobs=nothing,
        weight_versions=zeros,
        advantages=nothing,
        ref_logprobs=None,
        sequence_lengths=np.array([2], np.int32),
        prefix_starts=zero,
        prefix_lengths=zero,
        rewards=np.zeros(1, np.float32),
        first_versions=zero,
    )


def is_installed() -> bool:
    """Whether the package deepspeed is there; importing it takes seconds."""
    return importlib.util.find_spec("deepspeed") is not None


def _import_deepspeed(device_type: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # it would take a GPU wherever there is one
    try:
        import deepspeed
        import deepspeed.utils
    except ImportError as error:
        raise MissingExtraError("deepspeed", "deepspeed") from error
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # one per collective
    # On CPUs it would compile, with a compiler that may not be there, what only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
