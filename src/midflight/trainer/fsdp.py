"""The trainer contract on several ranks: parameters, gradients and optimizer states sharded by FSDP2.

A rank holds its rows of everything, and one decoder layer at a time whole, besides the embeddings, the head and the
final norm during a whole forward and backward pass. What is whole is of the dtype that is computed in; rows of what is
trained are float32. Every forward and backward pass is a collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from midflight.errors import CheckpointError
from midflight.models.activation_checkpointing import decoder_layers
from midflight.models.loading import empty_model, load_model, saved_tensors_of
from midflight.models.lora import base_name
from midflight.models.policy import PackedPolicy
from midflight.protocols import PolicyOutputs, WeightSender
from midflight.trainer.full_tensors import local
from midflight.trainer.policies import PLAIN_POLICY, PolicySettings, build_policy
from midflight.trainer.precision import ComputedPolicy
from midflight.trainer.saved_tensors import MODEL, SavedTensors
from midflight.trainer.single import OptimizerSettings, SingleProcessTrainer
from midflight.types import Microbatch


class ShardedTrainer(SingleProcessTrainer):
    """Implements TrainerBackend; all ranks of `mesh` call the same methods in the same order."""

    def __init__(
        self,
        model_path: Path,
        optimizer: OptimizerSettings,
        sender: WeightSender,
        mesh: DeviceMesh,
        policy: PolicySettings = PLAIN_POLICY,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(model_path, optimizer, sender, policy, device)
        self._mesh = mesh

    def _build_policy(self) -> PackedPolicy:
        """Each rank reads only its rows, unless the model's files name its parameters differently than it does."""
        policy = build_policy(self._model_path, self._policy_settings, empty_model)
        try:
            with SavedTensors(self._model_path, MODEL) as saved:
                if saved.names >= _read_from_files(policy).keys():
                    return self._filled(self._sharded(policy), saved)
        except CheckpointError:
            pass  # files that only an ordinary load understands, or can say what is wrong with
        return self._sharded(build_policy(self._model_path, self._policy_settings, load_model))

    def _sharded(self, policy: PackedPolicy) -> PackedPolicy:
        dtype = self._policy_settings.dtype
        # What a module is given stays as it is: rotary embeddings and hidden states are as they are in one process.
        computed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if policy.value_head is not None:
            fully_shard(policy.value_head, mesh=self._mesh)  # float32 always
        for module in [*decoder_layers(policy.model), policy]:
            fully_shard(module, mesh=self._mesh, mp_policy=computed)
        for sharded in _sharded_modules(policy):
            # Losses have the whole batch's denominator, so gradients add up; and gloo knows no reduction with a factor.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        return policy

    def _filled(self, policy: PackedPolicy, saved: SavedTensors) -> PackedPolicy:
        def with_memory(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor.to(self._device)

        policy._apply(with_memory)  # type: ignore[no-untyped-call]  # to_empty would empty the buffers, too
        for name, tensor in _read_from_files(policy).items():
            saved.fill(tensor, name)
        return policy

    def _computed_policy(self) -> ComputedPolicy:
        return ComputedPolicy(self._policy, torch.float32)  # FSDP makes the copies itself, a layer at a time

    @torch.no_grad()
    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        with self._proximal_in_place():
            return self.forward(microbatch)

    @contextlib.contextmanager
    def _proximal_in_place(self) -> Iterator[None]:
        """The proximal policy's rows stand where FSDP takes parameters from, and the policy's own where those were."""
        assert self._proximal is not None, "nothing was remembered"
        self._exchange(self._proximal)
        try:
            yield
        finally:
            self._exchange(self._proximal)

    def _exchange(self, others: dict[str, Tensor]) -> None:
        # What is whole now would be used again as it is.
        for module in _sharded_modules(self._policy):
            module.reshard()
        for name, parameter in self._trained.items():
            own, other = local(parameter), local(others[name])
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)


def _read_from_files(policy: PackedPolicy) -> dict[str, Tensor]:
    """What a model's own files hold of it, by the names there."""
    tensors = saved_tensors_of(policy.model)
    return {known: tensor for name, tensor in tensors.items() if (known := base_name(name)) is not None}


def _sharded_modules(policy: PackedPolicy) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]
