"""The trainer contract in one process: a Hugging Face model, AdamW, weights sent after every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from midflight.models.loading import load_tokenizer, quiet
from midflight.models.lora import has_adapter, save_adapter
from midflight.protocols import PolicyOutputs, WeightSender
from midflight.trainer.policies import (
    ADAPTER_DIRECTORY,
    PLAIN_POLICY,
    PolicySettings,
    build_policy,
    published_weights,
    saved_weights,
    trained_parameters,
)
from midflight.trainer.precision import ComputedPolicy
from midflight.types import Microbatch
from midflight.weights.slot_file import specs_of

_OPTIMIZER_FILE = "optimizer.safetensors"
_VALUE_HEAD_FILE = "value_head.safetensors"
_PROXIMAL_FILE = "proximal.safetensors"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


class SingleProcessTrainer:
    """Implements TrainerBackend."""

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
        """Load the model and announce the weights it will publish."""
        assert rank == 0, "a single process has one rank"
        self._tokenizer = load_tokenizer(self._model_path)
        self._policy = build_policy(self._model_path, self._policy_settings).to(self._device)
        self.model = self._policy.model
        self._computed = ComputedPolicy(self._policy, self._policy_settings.dtype)
        self._trained = trained_parameters(self._policy)
        self._optimizer = torch.optim.AdamW(
            self._trained.values(),
            betas=self._optimizer_settings.betas,
            weight_decay=self._optimizer_settings.weight_decay,
            fused=True,
        )
        self._sender.announce([spec for weight in self._published_weights() for spec in specs_of(dict([weight]))])

    def forward(self, microbatch: Microbatch) -> PolicyOutputs:
        scores, values = self._computed.policy(microbatch)
        return PolicyOutputs(scores.logprobs, scores.entropy, values)

    def remember_proximal(self) -> None:
        computed = trained_parameters(self._computed.policy)
        self._proximal = {name: parameter.detach().clone() for name, parameter in computed.items()}

    @torch.no_grad()
    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        assert self._proximal is not None, "nothing was remembered"
        scores, values = torch.func.functional_call(self._computed.policy, self._proximal, (microbatch,))
        return PolicyOutputs(scores.logprobs, scores.entropy, values)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, learning_rate: float) -> Mapping[str, float]:
        """Clip, step, and forget the gradients. A gradient that is not finite changes nothing: `skipped` is 1 then."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self._optimizer_settings.max_grad_norm)
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._computed.refresh()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "skipped": 0.0 if finite else 1.0}

    def publish_weights(self, version: int) -> None:
        self._sender.send(version, self._published_weights())

    def save(self, directory: Path) -> None:
        """Model and tokenizer as `from_pretrained` reads them; beside them what only training needs.

        With an adapter the model is the merged one, as it was published; training goes on from the adapter.
        """
        merged = None
        if has_adapter(self.model):
            merged = dict(self._published_weights())
            save_adapter(self.model, directory / ADAPTER_DIRECTORY)
        with quiet():
            self.model.save_pretrained(directory, state_dict=merged)
        self._tokenizer.save_pretrained(directory)
        states = {
            f"{kind}.{name}": tensor
            for name, parameter in self._trained.items()
            for kind, tensor in self._optimizer.state[parameter].items()
        }
        save_file(states, directory / _OPTIMIZER_FILE)
        if self._policy.value_head is not None:
            save_file(self._policy.value_head.state_dict(), directory / _VALUE_HEAD_FILE)
        if self._proximal is not None:
            save_file(self._proximal, directory / _PROXIMAL_FILE)

    def load(self, directory: Path) -> None:
        saved = saved_weights(self._policy, directory)
        with torch.no_grad():
            for name, parameter in trained_parameters(self.model).items():
                parameter.copy_(saved[name])
        self._computed.refresh()
        if self._policy.value_head is not None:
            self._policy.value_head.load_state_dict(load_file(directory / _VALUE_HEAD_FILE))
        if (directory / _PROXIMAL_FILE).exists():
            computed, proximal = trained_parameters(self._computed.policy), load_file(directory / _PROXIMAL_FILE)
            self._proximal = {name: tensor.to(computed[name]) for name, tensor in proximal.items()}
        # The settings stay the recipe's: a weight decay that was changed for the rest of the run counts.
        self._optimizer.state.clear()
        for key, tensor in load_file(directory / _OPTIMIZER_FILE).items():
            kind, _, name = key.partition(".")
            self._optimizer.state[self._trained[name]][kind] = tensor.to(self._device)

    def _published_weights(self) -> Iterator[tuple[str, Tensor]]:
        return published_weights(self._policy, self._policy_settings.dtype)
