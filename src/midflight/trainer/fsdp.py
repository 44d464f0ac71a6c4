"""Trainer backend on several ranks: FSDP2 shards parameters, gradients and optimizer states.

A rank holds its rows of all parameters, and the full parameters of one decoder layer at a time. The full embeddings,
head and final norm stay in memory during the forward and backward pass. Full parameters have the dtype of the forward
pass; rows of trained parameters are float32. Every forward and backward pass is a collective.
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
    """Trainer backend with FSDP2; all ranks of `mesh` call the same methods in the same order.

    Implements TrainerBackend.
    """

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
        """Build the policy; each rank reads only its rows, unless the files name parameters differently."""
        policy = build_policy(self._model_path, self._policy_settings, empty_model)
        try:
            with SavedTensors(self._model_path, MODEL) as saved:
                if saved.names >= _read_from_files(policy).keys():
                    return self._filled(self._sharded(policy), saved)
        except CheckpointError:
            pass  # the ordinary load below reads other formats, or reports the error
        return self._sharded(build_policy(self._model_path, self._policy_settings, load_model))

    def _sharded(self, policy: PackedPolicy) -> PackedPolicy:
        dtype = self._policy_settings.dtype
        # Inputs of modules are not cast, so rotary embeddings and hidden states equal those in one process.
        computed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if policy.value_head is not None:
            fully_shard(policy.value_head, mesh=self._mesh)  # always float32
        for module in [*decoder_layers(policy.model), policy]:
            fully_shard(module, mesh=self._mesh, mp_policy=computed)
        for sharded in _sharded_modules(policy):
            # Losses have the denominator of the whole batch, so gradients add up; gloo has no reduction with a factor.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        return policy

    def _filled(self, policy: PackedPolicy, saved: SavedTensors) -> PackedPolicy:
        def with_memory(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor.to(self._device)

        policy._apply(with_memory)  # type: ignore[no-untyped-call]  # to_empty would also empty the buffers
        for name, tensor in _read_from_files(policy).items():
            saved.fill(tensor, name)
        return policy

    def _computed_policy(self) -> ComputedPolicy:
        return ComputedPolicy(self._policy, torch.float32)  # FSDP makes the copies, one layer at a time

    @torch.no_grad()
    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        with self._proximal_in_place():
            return self.forward(microbatch)

    @contextlib.contextmanager
    def _proximal_in_place(self) -> Iterator[None]:
        """Exchange the rows of the policy and the proximal policy for the duration of the context."""
        assert self._proximal is not None, "remember_proximal was not called"
        self._exchange(self._proximal)
        try:
            yield
        finally:
            self._exchange(self._proximal)

    def _exchange(self, others: dict[str, Tensor]) -> None:
        # Free the full parameters: FSDP would otherwise reuse them.
        for module in _sharded_modules(self._policy):
            module.reshard()
        for name, parameter in self._trained.items():
            own, other = local(parameter), local(others[name])
            previous = own.clone()
            own.copy_(other)
            other.copy_(previous)


def _read_from_files(policy: PackedPolicy) -> dict[str, Tensor]:
    """Tensors of a policy that its model's files hold, by their names in the files."""
    tensors = saved_tensors_of(policy.model)
    return {known: tensor for name, tensor in tensors.items() if (known := base_name(name)) is not None}


def _sharded_modules(policy: PackedPolicy) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]
