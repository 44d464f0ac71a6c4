"""The trainer on the device against the trainer on the CPU, and its way to an engine on the same device."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.generation import LOGPROB_TOLERANCE, compare, generate, requests
from benchmarks.gpu.models import demo_model
from benchmarks.gpu.setting import Row, Setting, relative_difference
from benchmarks.train_load import DEMO_LOAD, make_trajectories, on_policy
from benchmarks.train_steps import PackedStep
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.loading import engine_model
from midflight.models.loading import load_config, load_model, weights_of
from midflight.preprocess.packing import pack
from midflight.protocols import WeightSender
from midflight.types import Microbatch, RolloutId, Trajectory
from midflight.weights.shared_memory import SharedMemoryTransport

# Relative. Float32 sums in another order differ by about 1e-6, bfloat16 by about 1e-2.
_FLOAT32, _BFLOAT16 = 1e-4, 5e-2
_SEQUENCES = 32
_LEARNING_RATE = 1e-3


def steps_in_float32(setting: Setting) -> list[Row]:
    """Compare losses, gradient norms and all gradients of packed training steps."""
    return _compare_steps(setting, torch.float32, _FLOAT32)


def steps_in_bfloat16(setting: Setting) -> list[Row]:
    """Compare bfloat16 passes on the device with float32 passes on the CPU, roughly."""
    return _compare_steps(setting, torch.bfloat16, _BFLOAT16)


def _compare_steps(setting: Setting, dtype: torch.dtype, tolerance: float) -> list[Row]:
    directory, microbatches = demo_model(), _microbatches()
    on_device = PackedStep(directory, microbatches, _SEQUENCES, dtype, setting.device)
    on_cpu = PackedStep(directory, microbatches, _SEQUENCES, torch.float32)
    rows: list[Row] = []
    for index in range(3):
        losses = on_device.add_gradients(), on_cpu.add_gradients()
        gradients = _gradients(on_device), _gradients(on_cpu)
        distance = max(_distance(gradients[0][name], expected) for name, expected in gradients[1].items())
        norms = [step.trainer.optimizer_step(_LEARNING_RATE).grad_norm for step in (on_device, on_cpu)]
        row = {
            "step": index,
            "loss": relative_difference(*losses),
            "grad_norm": relative_difference(norms[0], norms[1]),
            "largest_distance_of_a_gradient": distance,
        }
        rows.append(row)
        # Rounding decides where a tiny gradient takes AdamW, so later steps agree a little less.
        limit = tolerance * 5**index
        assert row["loss"] <= limit, f"step {index}: losses {losses} differ"
        assert row["grad_norm"] <= limit, f"step {index}: gradient norms {norms} differ"
        assert distance <= 4 * limit, f"step {index}: a gradient is {distance:.2e} of its norm away"
    return rows


def _microbatches() -> list[Microbatch]:
    load = dataclasses.replace(DEMO_LOAD, sequences=_SEQUENCES)
    trajectories = make_trajectories(load, load_config(demo_model()).vocab_size, seed=0)
    return list(pack(on_policy(trajectories, demo_model()), max_tokens=700))


def _gradients(step: PackedStep) -> dict[str, Tensor]:
    parameters = step.trainer.model.named_parameters()
    return {name: parameter.grad.detach().cpu() for name, parameter in parameters if parameter.grad is not None}


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


def checkpoint_round_trip(setting: Setting) -> list[Row]:
    """Save on the device, load on the device and on the CPU, and train one more step everywhere."""
    microbatches = _microbatches()
    first = _step(microbatches, setting.device)
    for _ in range(2):
        first.add_gradients()
        first.trainer.optimizer_step(_LEARNING_RATE)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=setting.scratch) as directory:
        first.trainer.save(Path(directory))
        others = {device: _step(microbatches, device) for device in (setting.device, "cpu")}
        for other in others.values():
            other.trainer.load(Path(directory))
    saved = {name: tensor.cpu().clone() for name, tensor in weights_of(first.trainer.model).items()}
    expected = first.add_gradients(), first.trainer.optimizer_step(_LEARNING_RATE).grad_norm
    for device, other in others.items():
        for name, tensor in weights_of(other.trainer.model).items():
            assert torch.equal(tensor.cpu(), saved[name]), f"{name} differs after loading on {device}"
        actual = other.add_gradients(), other.trainer.optimizer_step(_LEARNING_RATE).grad_norm
        differences = [relative_difference(*pair) for pair in zip(actual, expected, strict=True)]
        assert max(differences) <= _FLOAT32, f"after loading on {device}: {actual}, expected {expected}"
        rows.append({"loaded_on": device, "loss": differences[0], "grad_norm": differences[1]})
    return rows


def _step(microbatches: list[Microbatch], device: str, sender: WeightSender | None = None) -> PackedStep:
    return PackedStep(demo_model(), microbatches, _SEQUENCES, torch.float32, device, sender)


def trainer_to_engine(setting: Setting) -> list[Row]:
    """Publish through shared memory; the engine then samples like a new one, with the trainer's log-probabilities."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        shared = Path(directory) / "weights"
        transport = SharedMemoryTransport(shared, Path(directory) / "spare", print)
        step = _step(_microbatches(), setting.device, transport.sender())
        engine = _engine(setting, weights_of(load_model(demo_model())))
        for version in (1, 2):
            step.add_gradients()
            step.trainer.optimizer_step(_LEARNING_RATE)
            step.trainer.publish_weights(version)
        receiver = transport.receiver()
        incoming = receiver.receive()
        engine.stage(incoming)
        incoming.check()
        engine.adopt(2)
        receiver.close()
    asked = requests(12, load_config(demo_model()).vocab_size)
    completions = generate(engine, asked)
    fresh = generate(_engine(setting, weights_of(step.trainer.model), version=2), asked)
    rows = [compare(completions, fresh, "published weights")]
    largest = 0.0
    for request in asked:
        generated = completions[request.rollout_id].generated
        scores = step.trainer.forward(_packed(request.prompt_token_ids, generated.token_ids)).logprobs
        largest = max(largest, float((scores.detach().cpu() - torch.from_numpy(generated.logprobs)).abs().max()))
    assert largest <= LOGPROB_TOLERANCE, f"log-probabilities of engine and trainer differ by {largest:.2e}"
    return [*rows, {"case": "engine and trainer", "largest_logprob_difference": largest}]


def _engine(setting: Setting, weights: dict[str, Tensor], version: int = 0) -> Engine:
    limits = EngineLimits(max_num_seqs=12, max_prompt_tokens=70, max_new_tokens=24)
    config = load_config(demo_model())
    runner = engine_model(config, weights, max_length=limits.max_length, device=setting.on)
    return Engine(runner, limits, version=version)


def _packed(prompt: np.ndarray, generated: np.ndarray) -> Microbatch:
    token_ids = np.concatenate([prompt, generated]).astype(np.int32)
    mask = np.arange(len(token_ids)) >= len(prompt)
    zeros = np.zeros(len(token_ids), np.float32)
    trajectory = Trajectory(
        RolloutId(0), token_ids, mask, zeros, zeros.astype(np.int32), zeros, reward=0.0, first_version=0
    )
    return pack([trajectory], len(token_ids))[0]
