"""The running sequence of each slot: plain NumPy bookkeeping, no tensors, no policy.

Slots 0 .. num_active - 1 are running. When a sequence ends, the last active slot moves into its place, so that a step
works on contiguous arrays. Only this bookkeeping moves; keys and values stay in their pages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from midflight.engine.randomness import stream_key, uniforms_at
from midflight.protocols import StopRule
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

# Width of the table of stop tokens; a fixed width lets a step compare all slots in one operation.
MAX_STOP_TOKENS = 8
_NO_TOKEN = -1
StopRules = Callable[[tuple[str, ...]], StopRule]  # from the stop strings of a request


class RunningBatch:
    """The running sequences, one per slot.

    `lengths` counts prompt and generated tokens; `num_cached` counts the tokens whose keys and values are cached.
    """

    def __init__(self, max_num_seqs: int, max_length: int, max_pages: int, stop_rules: StopRules | None = None) -> None:
        self.max_num_seqs, self._stop_rules = max_num_seqs, stop_rules
        self.num_active = 0
        self.requests: list[GenerationRequest | None] = [None] * max_num_seqs
        self._rules: list[StopRule | None] = [None] * max_num_seqs
        self._num_stop_rules = 0  # slots with a rule
        self.slot_of: dict[RolloutId, int] = {}
        self.token_ids = np.zeros((max_num_seqs, max_length), np.int32)
        self.logprobs = np.zeros((max_num_seqs, max_length), np.float32)
        self.weight_versions = np.zeros((max_num_seqs, max_length), np.int32)
        self.tables = np.zeros((max_num_seqs, max_pages), np.int32)
        self.num_pages = np.zeros(max_num_seqs, np.int64)
        self.prompt_lengths = np.zeros(max_num_seqs, np.int64)
        self.first_positions = np.zeros(max_num_seqs, np.int64)  # tokens in the prompt sampled in earlier turns
        self.prefix_lengths = np.zeros(max_num_seqs, np.int64)  # prompt and resumed tokens
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.max_lengths = np.zeros(max_num_seqs, np.int64)
        self.num_cached = np.zeros(max_num_seqs, np.int64)
        self.ages = np.zeros(max_num_seqs, np.int64)  # admission number: the oldest sequence has the smallest
        self.epochs = np.zeros(max_num_seqs, np.int64)  # number of weight updates before the sequence was admitted
        self.stream_keys = np.zeros(max_num_seqs, np.uint64)
        self.temperatures = np.ones(max_num_seqs, np.float32)
        self.top_ks = np.zeros(max_num_seqs, np.int64)
        self.top_ps = np.ones(max_num_seqs, np.float32)
        self.min_ps = np.zeros(max_num_seqs, np.float32)
        self.stop_token_ids = np.full((max_num_seqs, MAX_STOP_TOKENS), _NO_TOKEN, np.int32)
        # All arrays with one entry per slot; `release` moves these entries together.
        self._arrays = [array for array in vars(self).values() if isinstance(array, np.ndarray)]
        self._next_age = 0

    def admit(self, request: GenerationRequest, prefix: Int32Array, epoch: int) -> int:
        """Put the request into the next slot and return the slot; none of its tokens are cached yet.

        `prefix`: prompt and resumed tokens.
        """
        slot = self.num_active
        self.num_active += 1
        self.requests[slot] = request
        self.slot_of[request.rollout_id] = slot
        prompt_length, length = len(request.prompt_token_ids), len(prefix)
        self.token_ids[slot, :length] = prefix
        if request.generated:
            self.logprobs[slot, prompt_length:length] = request.generated.logprobs
            self.weight_versions[slot, prompt_length:length] = request.generated.weight_versions
        self.prompt_lengths[slot], self.first_positions[slot] = prompt_length, request.first_position
        self.prefix_lengths[slot] = self.lengths[slot] = length
        self.max_lengths[slot] = prompt_length + request.sampling.max_tokens
        self.num_cached[slot] = self.num_pages[slot] = 0
        self.ages[slot], self.epochs[slot] = self._next_age, epoch
        self._next_age += 1
        self.stream_keys[slot] = stream_key(request.seed, request.name)
        self._set_sampling(slot, request.sampling)
        if self._stop_rules is not None and request.sampling.stop:
            self._rules[slot] = self._stop_rules(request.sampling.stop)
            self._num_stop_rules += 1
        return slot

    def add_page(self, slot: int, page: int) -> None:
        """Append a page to the page table of a slot."""
        self.tables[slot, self.num_pages[slot]] = page
        self.num_pages[slot] += 1

    def pages(self, slot: int) -> list[int]:
        """The pages of a slot, in the order of their tokens."""
        return self.tables[slot, : self.num_pages[slot]].tolist()  # type: ignore[no-any-return]

    def next_uniforms(self, slots: Int64Array) -> Float32Array:
        """Return the random number for the next token of each of these slots."""
        positions = self.first_positions[slots] + self.lengths[slots] - self.prompt_lengths[slots]
        return uniforms_at(self.stream_keys[slots], positions)

    def append(
        self, slots: Int64Array, token_ids: Int32Array, logprobs: Float32Array, version: int
    ) -> list[tuple[int, FinishReason]]:
        """Add one sampled token to each of these slots; return the slots that have ended, with the reason."""
        columns = self.lengths[slots]
        self.token_ids[slots, columns] = token_ids
        self.logprobs[slots, columns] = logprobs
        self.weight_versions[slots, columns] = version
        self.lengths[slots] += 1
        stopped = (self.stop_token_ids[slots] == token_ids[:, None]).any(axis=1)
        if self._num_stop_rules:
            for index, (slot, token_id) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
                rule = self._rules[slot]
                if rule is not None and rule.may_end(token_id):
                    response = slice(int(self.prompt_lengths[slot]), int(self.lengths[slot]))
                    stopped[index] |= rule.ends(self.token_ids[slot, response])
        ended = np.flatnonzero(stopped | (columns + 1 >= self.max_lengths[slots]))
        return [(int(slots[i]), FinishReason.STOP if stopped[i] else FinishReason.LENGTH) for i in ended]

    def generated(self, slot: int, start: int = 0) -> GeneratedTokens:
        """Copy the generated tokens of a slot, from response position `start` on."""
        columns = slice(int(self.prompt_lengths[slot]) + start, int(self.lengths[slot]))
        return GeneratedTokens(
            token_ids=self.token_ids[slot, columns].copy(),
            logprobs=self.logprobs[slot, columns].copy(),
            weight_versions=self.weight_versions[slot, columns].copy(),
        )

    def prefilled(self, slot: int, num_tokens: int, version: int) -> None:
        """Record that `version` of the weights has computed keys and values of the next `num_tokens` prefix tokens."""
        start = self.num_cached[slot]
        self.num_cached[slot] += num_tokens
        # Resumed tokens keep the version that sampled them.
        self.weight_versions[slot, start : min(start + num_tokens, self.prompt_lengths[slot])] = version

    def is_scoring(self, slot: int) -> bool:
        """Return True while a prompt that is to be scored is not completely prefilled."""
        request = self.requests[slot]
        assert request is not None
        return request.score_prompt and bool(self.num_cached[slot] < self.prompt_lengths[slot])

    def scored_prompt(self, slot: int) -> GeneratedTokens | None:
        """The scored prompt of a slot; None if the request does not score its prompt, or parts are still unscored."""
        request, length = self.requests[slot], int(self.prompt_lengths[slot])
        assert request is not None
        if not request.score_prompt or self.is_scoring(slot):
            return None
        logprobs = self.logprobs[slot, :length].copy()
        logprobs[0] = np.nan
        return GeneratedTokens(request.prompt_token_ids, logprobs, self.weight_versions[slot, :length].copy())

    def release(self, slot: int) -> GenerationRequest:
        """Remove the sequence of a slot and return its request. The last active slot moves into its place."""
        request = self.requests[slot]
        assert request is not None
        del self.slot_of[request.rollout_id]
        self._num_stop_rules -= self._rules[slot] is not None
        self.num_active -= 1
        last = self.num_active
        if slot != last:
            for array in self._arrays:
                array[slot] = array[last]
            moved = self.requests[slot] = self.requests[last]
            self._rules[slot] = self._rules[last]
            assert moved is not None
            self.slot_of[moved.rollout_id] = slot
        self.requests[last] = self._rules[last] = None
        return request

    def _set_sampling(self, slot: int, sampling: SamplingParams) -> None:
        self.temperatures[slot] = sampling.temperature
        self.top_ks[slot] = min(sampling.top_k, np.iinfo(np.int64).max)
        self.top_ps[slot], self.min_ps[slot] = sampling.top_p, sampling.min_p
        self.stop_token_ids[slot] = _NO_TOKEN
        self.stop_token_ids[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
