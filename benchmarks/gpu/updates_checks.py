"""Pauses of sequences in flight during weight updates, compared with a decode step."""

from __future__ import annotations

from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Row, Setting
from benchmarks.updates import bench_updates


def updates_smollm2_shape(setting: Setting) -> list[Row]:
    """Measure the shape of SmolLM2-135M."""
    return _updates(setting, "smollm2_shape", num_updates=30)


def updates_llama_1b_shape(setting: Setting) -> list[Row]:
    """Measure the shape of Llama 3.2 1B."""
    return _updates(setting, "llama_1b_shape", num_updates=12)


def _updates(setting: Setting, shape: str, num_updates: int) -> list[Row]:
    result = bench_updates(
        random_model(setting, shape),
        "bfloat16",
        num_updates=3 if setting.small else num_updates,
        sequences=4 if setting.small else 64,
        new_tokens=32 if setting.small else 256,
        device=setting.device,
    )
    assert result["aborted_requests"] == 0, f"{result['aborted_requests']} requests were aborted"
    return [{**result, "model": shape}]
