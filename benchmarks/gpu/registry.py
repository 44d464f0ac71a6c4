"""The checks, in the order of their value: if the time is up, the last ones are skipped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One check: a function of a Setting that returns rows, or raises.

    Checks of one group share a process, because starting one takes seconds. After a CUDA error, the rest of the group
    gets a new process.
    """

    name: str
    function: str  # "module:function"
    limit_s: float  # includes compiling kernels, but not the start of the process
    group: str
    figures: str | None = None  # the rows belong into gpu_FIGURES.json


def _check(name: str, limit_s: float, group: str, figures: str | None = None) -> Check:
    return Check(name, f"benchmarks.gpu.{group}_checks:{name}", limit_s, group, figures)


CHECKS = (
    _check("triton_attention_float32", 60, "kernel"),
    _check("triton_attention_bfloat16", 60, "kernel"),
    _check("other_kernels", 30, "kernel"),
    _check("fused_decoder", 45, "engine"),
    _check("fused_decoder_with_graphs", 45, "engine"),
    _check("transformers_modules", 60, "engine"),
    _check("transformers_modules_with_graphs", 60, "engine"),
    _check("mixture_of_experts", 40, "engine"),
    _check("preemption_and_prefix_cache", 30, "engine"),
    _check("update_in_flight", 30, "engine"),
    _check("recompute_kv", 30, "engine"),
    _check("staging_beside_graph_captures", 30, "engine"),
    _check("larger_model_in_bfloat16", 60, "engine"),
    _check("steps_in_float32", 45, "training"),
    _check("steps_in_bfloat16", 45, "training"),
    _check("checkpoint_round_trip", 30, "training"),
    _check("trainer_to_engine", 30, "training"),
    _check("demo_learns", 120, "demo"),
    _check("decode_smollm2_shape", 100, "decode", "decode"),
    _check("updates_llama_1b_shape", 60, "updates", "updates"),
    _check("train_smollm2_shape", 60, "train", "train"),
    _check("tcp_from_the_device", 40, "group"),
    _check("nccl_on_one_rank", 40, "group"),
    _check("nccl_twice_on_one_device", 50, "group"),
    _check("decode_llama_1b_shape", 110, "decode", "decode"),
    _check("train_llama_1b_shape", 60, "train", "train"),
    _check("updates_smollm2_shape", 40, "updates", "updates"),
)
