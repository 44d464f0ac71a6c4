"""Trainer backend in one process: a Hugging Face model, AdamW, weights sent after every step.

All operations also work on sharded tensors, so `trainer.fsdp` only has to shard the model.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from midflight.models.loading import Named, load_tokenizer, save_description, saved_buffers_of, weights_of
from midflight.models.lora import ADAPTER_STEM, adapter_weights, has_adapter, save_adapter_config
from midflight.models.policy import PackedPolicy
from midflight.protocols import OptimizerStep, PolicyOutputs, WeightSender
from midflight.trainer.allocator import return_freed_memory
from midflight.trainer.full_tensors import full_tensors, is_sharded, local
from midflight.trainer.policies import (
    ADAPTER_DIRECTORY,
    PLAIN_POLICY,
    PolicySettings,
    build_policy,
    published_specs,
    published_weights,
    trained_parameters,
)
from midflight.trainer.precision import ComputedPolicy
from midflight.trainer.saved_tensors import (
    FILE_BYTES,
    MASTERS,
    MODEL,
    OPTIMIZER,
    PROXIMAL,
    VALUE_HEAD,
    SavedTensors,
    save_on_first_rank,
    stem_of_masters,
)
from midflight.types import Microbatch, TensorSpec
from midflight.weights.specs import specs_of

_LARGE_MODEL_BYTES = 64 << 20  # returning memory takes 5 % of a step of the demo's model, and 1 % with 135M parameters


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Settings of AdamW and gradient clipping."""

    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


class SingleProcessTrainer:
    """Trainer backend of one process. Implements TrainerBackend."""

    def __init__(
        self,
        model_path: Path,
        optimizer: OptimizerSettings,
        sender: WeightSender,
        policy: PolicySettings = PLAIN_POLICY,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model_path, self._optimizer_settings, self._policy_settings = model_path, optimizer, policy
        self._sender, self._device = sender, torch.device(device)
        self._proximal: dict[str, Tensor] | None = None

    def init(self, rank: int) -> None:
        """Load the model and announce the specs of its published weights."""
        self._rank = rank
        self._tokenizer = load_tokenizer(self._model_path)
        self._policy = self._build_policy()
        self.model = self._policy.model
        self._computed = self._computed_policy()
        self._trained = trained_parameters(self._policy)
        self._optimizer = torch.optim.AdamW(
            self._trained.values(),
            betas=self._optimizer_settings.betas,
            weight_decay=self._optimizer_settings.weight_decay,
            fused=True,
        )
        own_bytes = sum(local(parameter).nbytes for parameter in self._policy.parameters())
        self._frees_memory = self._device.type == "cpu" and own_bytes >= _LARGE_MODEL_BYTES
        self._sender.announce(self._published_specs())

    def _build_policy(self) -> PackedPolicy:
        assert self._rank == 0, "a single process has one rank"
        return build_policy(self._model_path, self._policy_settings).to(self._device)

    def _computed_policy(self) -> ComputedPolicy:
        return ComputedPolicy(self._policy, self._policy_settings.dtype)

    def forward(self, microbatch: Microbatch) -> PolicyOutputs:
        scores, values = self._computed.policy(microbatch)
        return PolicyOutputs(scores.logprobs, scores.entropy, values)

    def remember_proximal(self) -> None:
        self._proximal = None  # free the previous copy first
        computed = trained_parameters(self._computed.policy)
        self._proximal = {name: parameter.detach().clone() for name, parameter in computed.items()}

    @torch.no_grad()
    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        assert self._proximal is not None, "remember_proximal was not called"
        scores, values = torch.func.functional_call(self._computed.policy, self._proximal, (microbatch,))
        return PolicyOutputs(scores.logprobs, scores.entropy, values)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, learning_rate: float) -> OptimizerStep:
        """Clip, step and clear the gradients. A gradient that is not finite changes nothing."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self._optimizer_settings.max_grad_norm)
        grad_norm = float(norm.full_tensor() if is_sharded(norm) else norm)
        finite = math.isfinite(grad_norm)
        changed = finite and learning_rate > 0 and any(weight.grad is not None for weight in self._trained.values())
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._computed.refresh()
        self._optimizer.zero_grad(set_to_none=True)
        if self._frees_memory:
            return_freed_memory()
        return OptimizerStep(grad_norm, skipped=not finite, changed=changed)

    def publish_weights(self, version: int, changed: bool = True) -> None:
        if changed:
            self._sender.send(version, self._published_weights())
        else:
            self._sender.relabel(version)

    def save(self, directory: Path) -> None:
        """Save model and tokenizer for `from_pretrained`, and the files that only training needs.

        With an adapter, the saved model has the merged weights, and training resumes from the adapter. If the dtype of
        checkpoints rounds the parameters, training resumes from the masters.
        """
        dtype = self._policy_settings.checkpoint_dtype
        if has_adapter(self.model):
            self._save_adapter(directory / ADAPTER_DIRECTORY)
        elif dtype is not torch.float32:
            self._save(directory, MASTERS, weights_of(self.model))
        weights = published_weights(self._policy, dtype)
        self._save_model(directory, weights, published_specs(self._policy, dtype))
        # One kind of state after another: an unsharded tensor between sharded ones would end a bucket.
        states = {
            f"{kind}.{name}": self._optimizer.state[parameter][kind]
            for kind in ("step", "exp_avg", "exp_avg_sq")
            for name, parameter in self._trained.items()
            if parameter in self._optimizer.state
        }
        self._save(directory, OPTIMIZER, states)
        if self._policy.value_head is not None:
            self._save(directory, VALUE_HEAD, self._policy.value_head.state_dict())
        if self._proximal is not None:
            self._save(directory, PROXIMAL, self._proximal)

    def _save_model(self, directory: Path, weights: Iterable[Named], specs: Iterable[TensorSpec]) -> None:
        """Save weights in the dtype of checkpoints, and the files that describe the model."""
        buffers = saved_buffers_of(self.model)
        saved = itertools.chain(weights, buffers.items())
        save_on_first_rank(self._rank, directory, MODEL, [*specs, *specs_of(buffers)], saved)
        if self._rank == 0:
            save_description(self.model, self._tokenizer, directory, self._policy_settings.checkpoint_dtype)

    def _save_adapter(self, directory: Path) -> None:
        if self._rank == 0:
            directory.mkdir()
            save_adapter_config(self.model, directory)
        self._save(directory, ADAPTER_STEM, adapter_weights(self.model), file_bytes=sys.maxsize)  # peft reads one file

    def _save(self, directory: Path, stem: str, tensors: Mapping[str, Tensor], file_bytes: int = FILE_BYTES) -> None:
        full = full_tensors(tensors.items())
        save_on_first_rank(self._rank, directory, stem, specs_of(tensors), full, file_bytes)

    def load(self, directory: Path) -> None:
        """Load a checkpoint of `save`, written on any number of ranks."""
        if has_adapter(self.model):
            _fill(adapter_weights(self.model), directory / ADAPTER_DIRECTORY, ADAPTER_STEM)
        else:
            _fill(saved_buffers_of(self.model), directory, MODEL)
            _fill(weights_of(self.model), directory, stem_of_masters(directory))
        self._computed.refresh()
        if self._policy.value_head is not None:
            _fill(self._policy.value_head.state_dict(), directory, VALUE_HEAD)
        self._load_proximal(directory)
        # Settings come from the recipe, not the checkpoint: a changed weight decay applies to the rest of the run.
        self._optimizer.state.clear()
        with SavedTensors(directory, OPTIMIZER) as saved:
            for key in saved.names:
                kind, _, name = key.partition(".")
                state = self._optimizer.state[self._trained[name]]
                if kind == "step":
                    # A copy: a view would keep the whole file mapped.
                    state[kind] = saved.read(key).to(self._device, copy=True)
                else:
                    state[kind] = torch.empty_like(self._trained[name], requires_grad=False)
                    saved.fill(state[kind], key)

    def _load_proximal(self, directory: Path) -> None:
        if any(directory.glob(f"{PROXIMAL}*")):
            self.remember_proximal()
            assert self._proximal is not None
            _fill(self._proximal, directory, PROXIMAL)

    def _published_weights(self) -> Iterator[Named]:
        # The rounded copies are ready. An adapter is merged from its masters.
        policy = self._policy if has_adapter(self.model) else self._computed.policy
        return published_weights(policy, self._policy_settings.dtype)

    def _published_specs(self) -> tuple[TensorSpec, ...]:
        return published_specs(self._policy, self._policy_settings.dtype)


def _fill(tensors: Mapping[str, Tensor], directory: Path, stem: str) -> None:
    with SavedTensors(directory, stem) as saved:
        for name, tensor in tensors.items():
            saved.fill(tensor, name)
