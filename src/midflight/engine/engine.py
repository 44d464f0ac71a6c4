"""Continuous batching with in-flight weight updates, in one process, over PyTorch.

`step()` = admit -> prefill -> decode -> sample -> record. An update happens between two steps: sequences in flight
keep their keys and values and their tokens, and go on under the new weights. Every token is recorded with the
version that sampled it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from midflight.engine.decoder import Decoder, DecoderShape, KVCache, PrefixKV
from midflight.engine.rows import MAX_STOP_TOKENS, RowTable
from midflight.engine.sampler import sample
from midflight.errors import RequestError
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId

# The attention window grows in steps, so that the kernels see few different shapes.
_WINDOW_STEP = 32
# Prompts kept for siblings that are still to come; a group's members start within a few steps of each other.
_MAX_CACHED_PREFIXES = 64


class Engine:
    """Implements Generator for a model of the Llama / Qwen2 family.

    Units: `num_rows` sequences at a time; `max_prompt_tokens` + `max_new_tokens` tokens each.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: Mapping[str, Tensor],
        *,
        num_rows: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        version: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._max_prompt_tokens, self._max_new_tokens = max_prompt_tokens, max_new_tokens
        self._num_rows = num_rows
        length = -(-(max_prompt_tokens + max_new_tokens) // _WINDOW_STEP) * _WINDOW_STEP
        self._decoder = Decoder(shape, weights, length, device)
        self._cache = KVCache(shape, num_rows, length, self._decoder.dtype, self._decoder.device)
        self._rows = RowTable(num_rows, max_new_tokens)
        self._waiting: deque[GenerationRequest] = deque()
        # Keys and values of prompts under the current weights only: an update empties it.
        self._prefixes: OrderedDict[bytes, PrefixKV] = OrderedDict()
        self._version = version

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_in_flight(self) -> int:
        return self._rows.num_active + len(self._waiting)

    @property
    def update_pending(self) -> bool:
        return False

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        for row in range(self._rows.num_active):
            request = self._rows.requests[row]
            assert request is not None
            if request.rollout_id == rollout_id:
                stop = int(self._rows.num_generated[row])
                columns = slice(start, stop)
                return GeneratedTokens(
                    self._rows.token_ids[row, columns].copy(),
                    self._rows.logprobs[row, columns].copy(),
                    self._rows.weight_versions[row, columns].copy(),
                )
        if any(request.rollout_id == rollout_id for request in self._waiting):
            return GeneratedTokens.none()
        raise KeyError(rollout_id)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises: RequestError naming the request and the number that does not fit; then none of them is added."""
        for request in requests:
            self._check(request)
        self._waiting.extend(requests)

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._decoder.load(weights)
        self._version = version
        self._prefixes.clear()

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        aborted = set(rollout_ids)
        kept: deque[GenerationRequest] = deque()
        completions = []
        for request in self._waiting:
            if request.rollout_id in aborted:
                generated = request.generated or GeneratedTokens.none()
                completions.append(Completion(request.rollout_id, generated, FinishReason.ABORT))
            else:
                kept.append(request)
        self._waiting = kept
        for row in reversed(range(self._rows.num_active)):
            request_in_row = self._rows.requests[row]
            assert request_in_row is not None
            if request_in_row.rollout_id in aborted:
                completions.append(self._release(row, FinishReason.ABORT))
        return completions

    def step(self) -> list[Completion]:
        num_decoding = self._rows.num_active
        admitted = self._admit()
        if not self._rows.num_active:
            return []
        logits = []
        if num_decoding:
            logits.append(self._decode(num_decoding))
        if admitted:
            logits.append(self._prefill(admitted))
        token_ids, logprobs = sample(
            torch.cat(logits),
            torch.from_numpy(self._rows.temperatures[: self._rows.num_active]).to(self._decoder.device),
            torch.from_numpy(self._rows.next_uniforms()).to(self._decoder.device),
        )
        ended = self._rows.record(token_ids.cpu().numpy().astype(np.int32), logprobs.cpu().numpy(), self._version)
        return [self._release(row, reason) for row, reason in ended]

    def _check(self, request: GenerationRequest) -> None:
        prompt, sampling = request.prompt_token_ids, request.sampling
        name = f"request {request.rollout_id}"
        if not 0 < len(prompt) <= self._max_prompt_tokens:
            raise RequestError(f"{name}: its prompt has {len(prompt)} tokens, not 1 to {self._max_prompt_tokens}")
        vocab_size = self._decoder.shape.vocab_size
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise RequestError(f"{name}: its prompt has token ids outside 0 to {vocab_size - 1}")
        if not 0 < sampling.max_tokens <= self._max_new_tokens:
            raise RequestError(f"{name}: max_tokens is {sampling.max_tokens}, not 1 to {self._max_new_tokens}")
        if request.generated and len(request.generated) >= sampling.max_tokens:
            raise RequestError(f"{name}: it already has {len(request.generated)} of {sampling.max_tokens} tokens")
        if sampling.temperature < 0:
            raise RequestError(f"{name}: temperature is {sampling.temperature}, not 0 or more")
        if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(f"{name}: {len(sampling.stop_token_ids)} stop tokens, not {MAX_STOP_TOKENS} or fewer")

    def _admit(self) -> list[GenerationRequest]:
        admitted = []
        while self._waiting and self._rows.num_active < self._num_rows:
            request = self._waiting.popleft()
            self._rows.admit(request)
            admitted.append(request)
        return admitted

    def _decode(self, num_rows: int) -> Tensor:
        rows = self._rows
        positions = rows.prompt_lengths[:num_rows] + rows.num_generated[:num_rows] - 1
        window = (int(positions.max()) // _WINDOW_STEP + 1) * _WINDOW_STEP
        tokens = torch.from_numpy(rows.last_tokens(num_rows).astype(np.int64))
        return self._decoder.decode(tokens, torch.from_numpy(positions), self._cache, window)

    def _prefill(self, admitted: Sequence[GenerationRequest]) -> Tensor:
        """Fill the cache of the newest rows and return the logits [B, V] that follow; siblings share one prefix."""
        sequences = [_prefix_tokens(request) for request in admitted]
        keys = [sequence.tobytes() for sequence in sequences]
        missing = {key: sequence for key, sequence in zip(keys, sequences, strict=True) if key not in self._prefixes}
        if missing:
            computed = self._decoder.prefill([torch.from_numpy(sequence) for sequence in missing.values()])
            self._prefixes.update(zip(missing, computed, strict=True))
        first_row = self._rows.num_active - len(admitted)
        for row, key in enumerate(keys, first_row):
            self._prefixes.move_to_end(key)
            self._cache.write_prefix(row, self._prefixes[key])
        logits = torch.stack([self._prefixes[key].next_logits for key in keys])
        while len(self._prefixes) > _MAX_CACHED_PREFIXES:
            self._prefixes.popitem(last=False)
        return logits

    def _release(self, row: int, reason: FinishReason) -> Completion:
        completion, moved = self._rows.release(row, reason)
        if moved is not None:
            in_cache = int(self._rows.prompt_lengths[row] + self._rows.num_generated[row]) - 1
            self._cache.move_row(moved, row, in_cache)
        return completion


def _prefix_tokens(request: GenerationRequest) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    parts = [request.prompt_token_ids]
    if request.generated:
        parts.append(request.generated.token_ids)
    return np.concatenate(parts).astype(np.int64)
