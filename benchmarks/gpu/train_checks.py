"""Training steps in bfloat16 over float32 parameters: tokens per second and the share of the measured GEMM rate."""

from __future__ import annotations

import dataclasses
import sys

from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Row, Setting
from benchmarks.train import TrainOptions, bench_train
from benchmarks.train_load import LONG_LOAD


def train_smollm2_shape(setting: Setting) -> list[Row]:
    """Measure the shape of SmolLM2-135M."""
    return _train(setting, "smollm2_shape")


def train_llama_1b_shape(setting: Setting) -> list[Row]:
    """Measure the shape of Llama 3.2 1B."""
    return _train(setting, "llama_1b_shape")


def _train(setting: Setting, shape: str) -> list[Row]:
    load, max_tokens = dataclasses.replace(LONG_LOAD, sequences=64), 16384
    if setting.small:
        load, max_tokens = dataclasses.replace(LONG_LOAD, sequences=4, median_response=20, max_response=60), 256
    options = TrainOptions(load, 1 if setting.small else 3, max_tokens, "bfloat16", setting.device)
    result = bench_train(random_model(setting, shape), options, lambda text: print(text, file=sys.stderr, flush=True))
    work = result["work"]
    return [
        {
            **row,
            "model": shape,
            "packed_tokens_per_step": work["packed_tokens"],
            "processed_tokens_per_s": row["packed"] * work["tokens"] / work["loss_tokens"],
            "gemm_rate": result["gemm_rate"],
            "max_tokens": max_tokens,
        }
        for row in result["rows"]
    ]
