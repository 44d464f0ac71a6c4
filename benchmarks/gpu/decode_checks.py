"""Decoded tokens per second in bfloat16, beside transformers' `generate` and the roofline measured in the same run."""

from __future__ import annotations

import sys

from benchmarks.decode import DecodeOptions, bench_decode
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Row, Setting

_SEQUENCES, _SMALL_SEQUENCES = (1, 8, 32, 128, 256), (1, 4)


def decode_smollm2_shape(setting: Setting) -> list[Row]:
    """Measure the shape of SmolLM2-135M."""
    return _decode(setting, "smollm2_shape")


def decode_llama_1b_shape(setting: Setting) -> list[Row]:
    """Measure the shape of Llama 3.2 1B."""
    return _decode(setting, "llama_1b_shape")


def _decode(setting: Setting, shape: str) -> list[Row]:
    options = DecodeOptions(
        dtypes=("bfloat16",),
        sequences=_SMALL_SEQUENCES if setting.small else _SEQUENCES,
        rounds=1 if setting.small else 2,
        new_tokens=12 if setting.small else 64,
        skip=frozenset({("transformers_cb", None)}),
        cap_s=30.0,
        device=setting.device,
    )
    result = bench_decode(random_model(setting, shape), options, lambda text: print(text, file=sys.stderr, flush=True))
    rows: list[Row] = []
    for row in result["rows"]:
        used = {key: row[key] for key in ("dtype", "sequences", "midflight", "transformers", "roofline")}
        own, other = row["midflight"], row["transformers"]
        rows.append(
            {
                "model": shape,
                **used,
                "over_transformers": own / other if own and other else None,
                "of_roofline": own / row["roofline"] if own else None,
            }
        )
    failures = [f"{each['engine']}, {each['sequences']} sequences: {each['error']}" for each in result["failures"]]
    assert not failures, "; ".join(failures)
    return [*rows, {"model": shape, "ceilings": result["ceilings"]["bfloat16"], "prompt_tokens": 32, "new_tokens": 64}]
