"""Worker process of vLLM, like decode_worker.py, but for the Python of vLLM's environment: it imports no midflight.

The engine core runs in this process. With two cores, a separate process was slower, and used a third of a core while
idle.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def start(options: dict[str, Any]) -> Any:
    """Start vLLM's engine. Environment variables are set first, as vLLM reads them on import."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="4",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, sorted(os.sched_getaffinity(0))[: options["num_threads"]])),
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",  # by default, vLLM leaves one core to a server
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM

    llm = LLM(
        model=options["model"],
        dtype=options["dtype"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        enforce_eager=True,  # compiling gained little on two cores and takes up to a minute
        gpu_memory_utilization=0.3,
        max_model_len=options["prompt_tokens"] + options["new_tokens"],
        max_num_seqs=options["max_sequences"],
        max_num_batched_tokens=4096,
    )
    return llm.llm_engine


def measure(engine: Any, prompts: list[list[int]], new_tokens: int, seed: int) -> dict[str, float]:
    """Measure tokens and seconds from every sequence's first token to the first sequence's last token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    counts: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        counts[f"{seed}-{index}"] = 0
        engine.add_request(f"{seed}-{index}", {"prompt_token_ids": prompt}, sampling)
    opened, before, now = None, 0, 0.0
    ended = False
    while not ended:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            counts[output.request_id] = len(output.outputs[0].token_ids)
            ended = ended or output.finished
        if opened is None and all(counts.values()):
            opened, before = now, sum(counts.values())
    if opened is None or now <= opened:
        raise RuntimeError("the sequences were never all decoded at the same time")
    after = sum(counts.values())
    while engine.has_unfinished_requests():
        engine.step()
    return {"tokens": after - before, "seconds": now - opened}


def main() -> None:
    options = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        engine = start(options)
        for line in sys.stdin:
            cpu_started = time.process_time()
            answer = {**measure(engine, **json.loads(line)), "compute_dtype": options["dtype"]}
            answer["cpu_seconds"] = time.process_time() - cpu_started
            print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
