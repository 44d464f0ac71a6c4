"""What runs in which row: plain NumPy bookkeeping, no tensors, no policy.

Rows 0 .. num_active - 1 are running. When one in the middle ends, the last active row takes its place, so that a step
works on contiguous arrays. Only these few numbers move; keys and values stay in their pages.
"""

from __future__ import annotations

import numpy as np

from midflight.engine.randomness import stream_key, uniforms_at
from midflight.types import (
    FinishReason,
    Float32Array,
    GeneratedTokens,
    GenerationRequest,
    Int32Array,
    Int64Array,
    RolloutId,
    SamplingParams,
)

# Stop tokens of a row sit in a fixed-width table so that a step compares them in one operation.
MAX_STOP_TOKENS = 8
_NO_TOKEN = -1


class RowTable:
    """The running sequences; `lengths` counts prompt and generated tokens, `num_cached` those with keys and values."""

    def __init__(self, num_rows: int, max_length: int, max_pages: int) -> None:
        self.num_rows = num_rows
        self.num_active = 0
        self.requests: list[GenerationRequest | None] = [None] * num_rows
        self.row_of: dict[RolloutId, int] = {}
        self.token_ids = np.zeros((num_rows, max_length), np.int32)
        self.logprobs = np.zeros((num_rows, max_length), np.float32)
        self.weight_versions = np.zeros((num_rows, max_length), np.int32)
        self.tables = np.zeros((num_rows, max_pages), np.int32)
        self.num_pages = np.zeros(num_rows, np.int64)
        self.prompt_lengths = np.zeros(num_rows, np.int64)
        self.first_positions = np.zeros(num_rows, np.int64)  # sampled tokens of the prompt: of earlier turns
        self.prefix_lengths = np.zeros(num_rows, np.int64)  # of prompt and resumed tokens
        self.lengths = np.zeros(num_rows, np.int64)
        self.max_lengths = np.zeros(num_rows, np.int64)
        self.num_cached = np.zeros(num_rows, np.int64)
        self.ages = np.zeros(num_rows, np.int64)  # counts up with every admission
        self.epochs = np.zeros(num_rows, np.int64)  # which weights computed the first of its cached tokens
        self.stream_keys = np.zeros(num_rows, np.uint64)
        self.temperatures = np.ones(num_rows, np.float32)
        self.top_ks = np.zeros(num_rows, np.int64)
        self.top_ps = np.ones(num_rows, np.float32)
        self.min_ps = np.zeros(num_rows, np.float32)
        self.stop_token_ids = np.full((num_rows, MAX_STOP_TOKENS), _NO_TOKEN, np.int32)
        # Every array with one entry per row, moved together.
        self._arrays = [array for array in vars(self).values() if isinstance(array, np.ndarray)]
        self._next_age = 0

    def admit(self, request: GenerationRequest, prefix: Int32Array, epoch: int) -> int:
        """Give the request, whose prompt and resumed tokens are `prefix`, the next row; nothing of it is cached."""
        row = self.num_active
        self.num_active += 1
        self.requests[row] = request
        self.row_of[request.rollout_id] = row
        prompt_length, length = len(request.prompt_token_ids), len(prefix)
        self.token_ids[row, :length] = prefix
        if request.generated:
            self.logprobs[row, prompt_length:length] = request.generated.logprobs
            self.weight_versions[row, prompt_length:length] = request.generated.weight_versions
        self.prompt_lengths[row], self.first_positions[row] = prompt_length, request.first_position
        self.prefix_lengths[row] = self.lengths[row] = length
        self.max_lengths[row] = prompt_length + request.sampling.max_tokens
        self.num_cached[row] = self.num_pages[row] = 0
        self.ages[row], self.epochs[row] = self._next_age, epoch
        self._next_age += 1
        self.stream_keys[row] = stream_key(request.seed, request.rollout_id)
        self._set_sampling(row, request.sampling)
        return row

    def add_page(self, row: int, page: int) -> None:
        self.tables[row, self.num_pages[row]] = page
        self.num_pages[row] += 1

    def pages(self, row: int) -> list[int]:
        return self.tables[row, : self.num_pages[row]].tolist()  # type: ignore[no-any-return]

    def next_uniforms(self, rows: Int64Array) -> Float32Array:
        positions = self.first_positions[rows] + self.lengths[rows] - self.prompt_lengths[rows]
        return uniforms_at(self.stream_keys[rows], positions)

    def append(
        self, rows: Int64Array, token_ids: Int32Array, logprobs: Float32Array, version: int
    ) -> list[tuple[int, FinishReason]]:
        """Add one sampled token to each of these rows; those that thereby ended."""
        columns = self.lengths[rows]
        self.token_ids[rows, columns] = token_ids
        self.logprobs[rows, columns] = logprobs
        self.weight_versions[rows, columns] = version
        self.lengths[rows] += 1
        stopped = (self.stop_token_ids[rows] == token_ids[:, None]).any(axis=1)
        ended = np.flatnonzero(stopped | (columns + 1 >= self.max_lengths[rows]))
        return [(int(rows[i]), FinishReason.STOP if stopped[i] else FinishReason.LENGTH) for i in ended]

    def generated(self, row: int, start: int = 0) -> GeneratedTokens:
        columns = slice(int(self.prompt_lengths[row]) + start, int(self.lengths[row]))
        return GeneratedTokens(
            token_ids=self.token_ids[row, columns].copy(),
            logprobs=self.logprobs[row, columns].copy(),
            weight_versions=self.weight_versions[row, columns].copy(),
        )

    def prefilled(self, row: int, num_tokens: int, version: int) -> None:
        """The next `num_tokens` tokens of the prefix have keys and values, made by `version` of the weights."""
        start = self.num_cached[row]
        self.num_cached[row] += num_tokens
        # Resumed tokens keep the version that sampled them.
        self.weight_versions[row, start : min(start + num_tokens, self.prompt_lengths[row])] = version

    def is_scoring(self, row: int) -> bool:
        """Whether part of a prompt that is to be scored still has to be read."""
        request = self.requests[row]
        assert request is not None
        return request.score_prompt and bool(self.num_cached[row] < self.prompt_lengths[row])

    def scored_prompt(self, row: int) -> GeneratedTokens | None:
        """None if nobody asked, or not all of it is scored."""
        request, length = self.requests[row], int(self.prompt_lengths[row])
        assert request is not None
        if not request.score_prompt or self.is_scoring(row):
            return None
        logprobs = self.logprobs[row, :length].copy()
        logprobs[0] = np.nan
        return GeneratedTokens(request.prompt_token_ids, logprobs, self.weight_versions[row, :length].copy())

    def release(self, row: int) -> GenerationRequest:
        """Take a row out. The last active row moves into its place."""
        request = self.requests[row]
        assert request is not None
        del self.row_of[request.rollout_id]
        self.num_active -= 1
        last = self.num_active
        if row != last:
            for array in self._arrays:
                array[row] = array[last]
            moved = self.requests[row] = self.requests[last]
            assert moved is not None
            self.row_of[moved.rollout_id] = row
        self.requests[last] = None
        return request

    def _set_sampling(self, row: int, sampling: SamplingParams) -> None:
        self.temperatures[row] = sampling.temperature
        self.top_ks[row] = min(sampling.top_k, np.iinfo(np.int64).max)
        self.top_ps[row], self.min_ps[row] = sampling.top_p, sampling.min_p
        self.stop_token_ids[row] = _NO_TOKEN
        self.stop_token_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
