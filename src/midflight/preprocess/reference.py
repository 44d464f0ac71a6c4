"""A frozen copy of a model in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from midflight.models.loading import load_model
from midflight.models.policy import PackedPolicy
from midflight.types import Float32Array, Microbatch


class FrozenReference:
    """Reference policy with fixed weights. Implements Reference."""

    def __init__(self, model_path: Path, temperature: float, device: torch.device | str = "cpu") -> None:
        """Raises: ModelError if the model cannot be loaded."""
        self._policy = PackedPolicy(load_model(model_path), temperature).to(device)

    @torch.inference_mode()
    def logprobs(self, microbatch: Microbatch) -> Float32Array:
        scores, _ = self._policy(microbatch)
        logprobs = np.zeros(len(microbatch.token_ids), np.float32)
        logprobs[microbatch.loss_mask] = scores.logprobs.cpu().numpy()
        return logprobs
