"""Engines that share this environment, each measured over the same window.

The window opens when every sequence has its first token and closes when the first sequence has its last token. So each
of its steps decodes all sequences and prefills no prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList, set_seed

from benchmarks.embedded import EmbeddedEngine, build_embedded_engine
from benchmarks.roofline import synchronize
from midflight.models.loading import quiet
from midflight.types import Completion, GenerationRequest, RolloutId, SamplingParams

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Tokens and seconds of one engine's window."""

    tokens: int
    seconds: float
    compute_dtype: str


class DecodeEngine(Protocol):
    """Engine that samples exactly `new_tokens` tokens per prompt, at temperature 1."""

    def measure(self, prompts: Prompts, new_tokens: int, seed: int) -> Measurement: ...


class Embedded:
    """Midflight's own engine, with one slot per prompt; it always returns log-probabilities."""

    def __init__(self, directory: Path, dtype: str, max_new_tokens: int, device: str) -> None:
        self._directory, self._dtype, self._max_new_tokens, self._device = directory, dtype, max_new_tokens, device
        self._num_rows = 0
        self._engine: EmbeddedEngine | None = None

    def measure(self, prompts: Prompts, new_tokens: int, seed: int) -> Measurement:
        engine, _, compute_dtype = self._engine_for(prompts)
        rollout_ids = [RolloutId(index) for index in range(len(prompts))]
        sampling = SamplingParams(new_tokens)
        engine.add(
            [
                GenerationRequest(rollout_id, np.asarray(prompt, np.int32), sampling, seed)
                for rollout_id, prompt in zip(rollout_ids, prompts, strict=True)
            ]
        )

        def num_tokens() -> list[int]:
            return [len(engine.generated(rollout_id)) for rollout_id in rollout_ids]

        counts = [0]
        while not all(counts):
            engine.step()
            counts = num_tokens()
        before, opened = sum(counts), time.perf_counter()
        ended: list[Completion] = []
        while not ended:
            ended = engine.step()
        closed = time.perf_counter()
        done = {completion.rollout_id: len(completion.generated) for completion in ended}
        after = sum(done.get(rollout_id) or len(engine.generated(rollout_id)) for rollout_id in rollout_ids)
        while engine.num_in_flight:
            engine.step()
        return Measurement(after - before, closed - opened, compute_dtype)

    def _engine_for(self, prompts: Prompts) -> EmbeddedEngine:
        if self._engine is None or self._num_rows != len(prompts):
            self._engine = None  # frees its memory for the next engine
            self._num_rows = len(prompts)
            self._engine = build_embedded_engine(
                self._directory,
                self._dtype,
                max_num_seqs=self._num_rows,
                max_prompt_tokens=max(map(len, prompts)),
                max_new_tokens=self._max_new_tokens,
                device=self._device,
            )
        return self._engine


class Stopwatch(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that never stops, and records the time of each token."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        synchronize(input_ids.device)
        self.stamps.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class TransformersGenerate:
    """`model.generate` on the whole batch, without log-probabilities: it could only return whole score vectors."""

    def __init__(self, directory: Path, dtype: str, max_new_tokens: int, device: str) -> None:
        self._model = load_transformers(directory, dtype, device)
        self._dtype = dtype

    def measure(self, prompts: Prompts, new_tokens: int, seed: int) -> Measurement:
        set_seed(seed)
        tokens_BT = torch.tensor(prompts, device=self._model.device)
        stopwatch = Stopwatch()
        self._model.generate(
            input_ids=tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            generation_config=sampling_config(new_tokens),
            stopping_criteria=StoppingCriteriaList([stopwatch]),
        )
        opened, *rest = stopwatch.stamps
        return Measurement(len(prompts) * len(rest), rest[-1] - opened, self._dtype)


class TransformersContinuousBatching:
    """Continuous batching of transformers, with log-probabilities and a cache as large as the requests need."""

    def __init__(self, directory: Path, dtype: str, max_new_tokens: int, device: str) -> None:
        self._model = load_transformers(directory, dtype, device)
        self._dtype = dtype

    def measure(self, prompts: Prompts, new_tokens: int, seed: int) -> Measurement:
        from transformers import ContinuousBatchingConfig  # missing in the oldest supported transformers

        page_size = 32
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=len(prompts) * (-(-(max(map(len, prompts)) + new_tokens) // page_size) + 1),
            # Room for prompts beside decoding sequences: the last sequence must start before the first one ends.
            max_batch_tokens=max(512, 8 * len(prompts)),
            allow_block_sharing=False,
            return_logprobs=True,
            seed=seed,
        )
        with self._model.continuous_batching_context_manager(
            generation_config=sampling_config(new_tokens), continuous_batching_config=config, warmup=False
        ) as manager:
            request_ids = manager.add_requests(list(map(list, prompts)), new_tokens, record_timestamps=True)
            outputs = [manager.get_result() for _ in request_ids]
        failed = [output.error if output else "its loop ended" for output in outputs if not output or output.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        return window([output.timestamps for output in outputs], self._dtype)


def window(stamps: Sequence[Sequence[float]], compute_dtype: str) -> Measurement:
    """Measure the window of sequences, given the time stamp of every token (seconds).

    Both ends of the window are stamps of the sequence that began last, so the window contains whole steps only.
    Raises: ValueError if the first sequence ended before the last one began.
    """
    clock = max(stamps, key=lambda times: times[0])
    opened, first_end = clock[0], min(times[-1] for times in stamps)
    if first_end <= opened:
        raise ValueError("the sequences were never all decoded at the same time")
    closed = min(stamp for stamp in clock if stamp >= first_end)
    tokens = sum(opened < stamp <= closed for stamp in chain.from_iterable(stamps))
    return Measurement(tokens, closed - opened, compute_dtype)


def load_transformers(directory: Path, dtype: str, device: str) -> Any:
    """Load the plain transformers model, without the checkpoint's defaults that would stop or change sampling."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig()
    model.config.eos_token_id = None
    return model.eval().to(device)


def sampling_config(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, pad_token_id=0
    )


ENGINES: dict[str, Callable[[Path, str, int, str], DecodeEngine]] = {
    "midflight": Embedded,
    "transformers": TransformersGenerate,
    "transformers_cb": TransformersContinuousBatching,
}
