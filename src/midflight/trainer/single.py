"""The trainer contract in one process: a Hugging Face model, AdamW, weights sent after every step.

Suffixes: T packed tokens, M tokens that carry loss, D model, V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from midflight.models.attention import PackedSequences
from midflight.models.loading import load_model, load_tokenizer, quiet, weights_of
from midflight.protocols import WeightSender
from midflight.types import Microbatch
from midflight.weights.slot_file import specs_of

_OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


class SingleProcessTrainer:
    """Implements TrainerBackend."""

    def __init__(
        self,
        model_path: Path,
        settings: OptimizerSettings,
        sender: WeightSender,
        temperature: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model_path, self._settings = model_path, settings
        self._sender, self._temperature = sender, temperature
        self._device = torch.device(device)

    def init(self, rank: int) -> None:
        """Load the model and announce the weights it will publish."""
        assert rank == 0, "a single process has one rank"
        self._tokenizer = load_tokenizer(self._model_path)
        self.model: Any = load_model(self._model_path).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self._settings.learning_rate,
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
            fused=True,
        )
        self._sender.announce(specs_of(weights_of(self.model)))

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at every token that carries loss, under the sampling temperature; both [M].

        A token is predicted from the hidden state of the one before it: the only place where the shift happens.
        """
        token_ids_T = self._tensor(microbatch.token_ids)
        packed = PackedSequences.of(microbatch, self._device)
        hidden_TD = self.model.base_model(
            input_ids=token_ids_T[None],
            position_ids=self._tensor(microbatch.position_ids)[None],
            use_cache=False,
            packed=packed,
        ).last_hidden_state[0]
        predicted_M = self._tensor(microbatch.loss_mask).nonzero().squeeze(1)
        hidden_MD = hidden_TD.index_select(0, packed.previous_index[predicted_M])
        logits_MV = self.model.get_output_embeddings()(hidden_MD).float() / self._temperature
        all_logprobs_MV = torch.log_softmax(logits_MV, dim=-1)
        with torch.no_grad():
            entropy_M = -(all_logprobs_MV.exp() * all_logprobs_MV).sum(dim=-1)
        return all_logprobs_MV.gather(1, token_ids_T[predicted_M, None]).squeeze(1), entropy_M

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self) -> Mapping[str, float]:
        """Clip, step, and forget the gradients. A gradient that is not finite changes nothing: `skipped` is 1 then."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm)
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "skipped": 0.0 if finite else 1.0}

    def publish_weights(self, version: int) -> None:
        self._sender.send(version, weights_of(self.model))

    def save(self, directory: Path) -> None:
        """Model and tokenizer as `from_pretrained` reads them, and the optimizer's state beside them."""
        with quiet():
            self.model.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)
        state = self._optimizer.state_dict()["state"]
        tensors = {f"{index}.{name}": tensor for index, entry in state.items() for name, tensor in entry.items()}
        save_file(tensors, directory / _OPTIMIZER_FILE)

    def load(self, directory: Path) -> None:
        saved = weights_of(load_model(directory))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(saved[name])
        state: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in load_file(directory / _OPTIMIZER_FILE).items():
            index, _, name = key.partition(".")
            state[int(index)][name] = tensor
        # The settings stay the recipe's: a learning rate that was changed for the rest of the run counts.
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": dict(state)})

    def _tensor(self, array: Any) -> Tensor:
        tensor = torch.tensor(array)
        return (tensor.long() if tensor.dtype == torch.int32 else tensor).to(self._device)
