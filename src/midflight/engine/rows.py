"""What runs in which row: plain NumPy bookkeeping, no tensors, no policy.

Rows 0 .. num_active - 1 are running. When one in the middle ends, the last active row moves into the hole, so a
decode step always works on a contiguous block and a draining batch costs what its rows cost.
"""

from __future__ import annotations

import numpy as np

from midflight.engine.randomness import uniforms
from midflight.types import Completion, FinishReason, Float32Array, GeneratedTokens, GenerationRequest, Int32Array

# Stop tokens of a row sit in a fixed-width table so that a step compares them in one operation.
MAX_STOP_TOKENS = 8
_NO_TOKEN = -1


class RowTable:
    """The running sequences. Invariant: `len(prompt) + num_generated - 1` tokens of a row are in the KV cache."""

    def __init__(self, num_rows: int, max_new_tokens: int) -> None:
        self.num_active = 0
        self.requests: list[GenerationRequest | None] = [None] * num_rows
        self.token_ids = np.zeros((num_rows, max_new_tokens), np.int32)
        self.logprobs = np.zeros((num_rows, max_new_tokens), np.float32)
        self.weight_versions = np.zeros((num_rows, max_new_tokens), np.int32)
        self.uniforms = np.zeros((num_rows, max_new_tokens), np.float32)
        self.num_generated = np.zeros(num_rows, np.int64)
        self.max_tokens = np.zeros(num_rows, np.int64)
        self.prompt_lengths = np.zeros(num_rows, np.int64)
        self.temperatures = np.ones(num_rows, np.float32)
        self.stop_token_ids = np.full((num_rows, MAX_STOP_TOKENS), _NO_TOKEN, np.int32)
        # Every array with one entry per row, moved together.
        self._arrays = [array for array in vars(self).values() if isinstance(array, np.ndarray)]

    def admit(self, request: GenerationRequest) -> int:
        """Give the request the next row and return it."""
        row = self.num_active
        self.num_active += 1
        self.requests[row] = request
        sampling, resumed = request.sampling, request.generated
        num_resumed = len(resumed) if resumed else 0
        if resumed:
            self.token_ids[row, :num_resumed] = resumed.token_ids
            self.logprobs[row, :num_resumed] = resumed.logprobs
            self.weight_versions[row, :num_resumed] = resumed.weight_versions
        self.num_generated[row] = num_resumed
        self.max_tokens[row] = sampling.max_tokens
        self.prompt_lengths[row] = len(request.prompt_token_ids)
        self.temperatures[row] = sampling.temperature
        self.stop_token_ids[row] = _NO_TOKEN
        self.stop_token_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.uniforms[row, : sampling.max_tokens] = uniforms(request.seed, request.rollout_id, sampling.max_tokens)
        return row

    def last_tokens(self, num_rows: int) -> Int32Array:
        return self.token_ids[np.arange(num_rows), self.num_generated[:num_rows] - 1]

    def next_uniforms(self) -> Float32Array:
        active = self.num_active
        return self.uniforms[np.arange(active), self.num_generated[:active]]

    def record(self, token_ids: Int32Array, logprobs: Float32Array, version: int) -> list[tuple[int, FinishReason]]:
        """Append one sampled token to every active row; the rows that thereby ended, last row first."""
        active = self.num_active
        rows, columns = np.arange(active), self.num_generated[:active]
        self.token_ids[rows, columns] = token_ids
        self.logprobs[rows, columns] = logprobs
        self.weight_versions[rows, columns] = version
        self.num_generated[:active] += 1
        stopped = (self.stop_token_ids[:active] == token_ids[:, None]).any(axis=1)
        full = self.num_generated[:active] >= self.max_tokens[:active]
        ended = np.flatnonzero(stopped | full)[::-1]
        return [(int(row), FinishReason.STOP if stopped[row] else FinishReason.LENGTH) for row in ended]

    def release(self, row: int, reason: FinishReason) -> tuple[Completion, int | None]:
        """Take a row out. Returns its completion and the row that moved into its place, if one did."""
        request = self.requests[row]
        assert request is not None
        length = int(self.num_generated[row])
        generated = GeneratedTokens(
            token_ids=self.token_ids[row, :length].copy(),
            logprobs=self.logprobs[row, :length].copy(),
            weight_versions=self.weight_versions[row, :length].copy(),
        )
        self.num_active -= 1
        last = self.num_active
        if row != last:
            for array in self._arrays:
                array[row] = array[last]
            self.requests[row] = self.requests[last]
        self.requests[last] = None
        return Completion(request.rollout_id, generated, reason), (last if row != last else None)
