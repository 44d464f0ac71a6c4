"""Who computes what in the next step: admission, chunked prefill, pages, preemption. No tensors are touched here.

A slot has `lengths` tokens, and the keys and values of `num_cached` of them are cached. It starts with a prefix: the
prompt and any tokens generated before an interruption. The prefix is prefilled in chunks, so that decoding slots never
wait for a long prefill. Afterwards one token at a time is missing: a decode. If pages run out, the youngest slot is
preempted: it keeps its tokens, frees its pages, and is prefilled again when there is room. The oldest slot can always
finish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from midflight.engine.pages import PagePool
from midflight.engine.plan import Chunk, StepPlan
from midflight.engine.running_batch import RunningBatch
from midflight.types import (
    Completion,
    FinishReason,
    Float32Array,
    GeneratedTokens,
    GenerationRequest,
    Int32Array,
    Int64Array,
    RolloutId,
)


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: GenerationRequest
    prefix: Int32Array  # prompt and generated tokens


class Scheduler:
    def __init__(
        self,
        running: RunningBatch,
        pool: PagePool[Tensor],
        max_batched_tokens: int,
        prefix_caching: bool,
        max_scored_tokens: int,
    ) -> None:
        """`max_scored_tokens`: of prompts, in one step."""
        self.running, self.pool = running, pool
        self._max_batched_tokens, self._max_scored_tokens = max_batched_tokens, max_scored_tokens
        self._prefix_caching = prefix_caching
        self._waiting: deque[_Waiting] = deque()
        self._ids: set[RolloutId] = set()  # in a slot or waiting
        self._prefilling: set[bytes] = set()  # prefixes that siblings in the queue wait for
        self._cached_logits: list[tuple[int, Tensor]] = []  # (slot, its next logits) of those just admitted
        self._copies: list[tuple[int, int]] = []
        self._epoch = 0
        self.num_preempted = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._ids)

    def __contains__(self, rollout_id: RolloutId) -> bool:
        return rollout_id in self._ids

    def add(self, request: GenerationRequest) -> None:
        self._ids.add(request.rollout_id)
        self._waiting.append(_waiting(request))

    def generated(self, rollout_id: RolloutId, start: int) -> GeneratedTokens:
        slot = self.running.slot_of.get(rollout_id)
        if slot is not None:
            return self.running.generated(slot, start)
        for entry in self._waiting:
            if entry.request.rollout_id == rollout_id:
                return (entry.request.generated or GeneratedTokens.none()).part(start)
        raise KeyError(rollout_id)

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        aborted = set(rollout_ids)
        completions = [
            Completion(entry.request.rollout_id, entry.request.generated or GeneratedTokens.none(), FinishReason.ABORT)
            for entry in self._waiting
            if entry.request.rollout_id in aborted
        ]
        self._waiting = deque(entry for entry in self._waiting if entry.request.rollout_id not in aborted)
        self._ids -= {completion.rollout_id for completion in completions}
        for rollout_id in aborted & self.running.slot_of.keys():
            completions.append(self.release(self.running.slot_of[rollout_id], FinishReason.ABORT))
        return completions

    def weights_changed(self, recompute: bool) -> None:
        """No known prefix may be used again; with `recompute`, nor may the keys and values of running slots."""
        self._epoch += 1
        self.pool.forget()
        running = self.running
        again = [int(running.ages[slot]) for slot in range(running.num_active) if recompute or running.is_scoring(slot)]
        for age in sorted(again, reverse=True):
            self._preempt_age(age)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run: nothing is in flight."""
        if self._make_room():
            self._admit()
        return self._plan() if self.running.num_active else None

    def record(
        self,
        plan: StepPlan,
        logits: Tensor | None,
        token_ids: Int32Array,
        logprobs: Float32Array,
        scores: Float32Array,
        version: int,
    ) -> list[Completion]:
        """Record a sampled token for each of plan.sampled_slots and a score for each of plan.scored_slots.

        `logits`: those of plan.logits_index that were sampled from.
        """
        running = self.running
        decoded = plan.slots[: plan.num_decode]
        running.num_cached[decoded] += 1
        for chunk in plan.chunks:
            running.prefilled(chunk.slot, chunk.stop - chunk.start, version)
        running.logprobs[plan.scored_slots, plan.scored_positions] = scores
        if logits is not None:
            for index in range(plan.num_decode, len(logits)):
                self._remember_prefix(int(plan.sampled_slots[index]), logits[index])
        ended = running.append(plan.sampled_slots, token_ids, logprobs, version)
        ended += [
            (chunk.slot, FinishReason.LENGTH)
            for chunk in plan.chunks
            if running.num_cached[chunk.slot] == running.max_lengths[chunk.slot]  # nothing was to be sampled
        ]
        # From the last slot down: a released slot is filled from the end.
        return [self.release(slot, reason) for slot, reason in sorted(ended, key=lambda pair: -pair[0])]

    def release(self, slot: int, reason: FinishReason) -> Completion:
        running = self.running
        generated, prompt = running.generated(slot), running.scored_prompt(slot)
        self._give_back_pages(slot)
        request = running.release(slot)
        self._ids.remove(request.rollout_id)
        return Completion(request.rollout_id, generated, reason, prompt)

    def _make_room(self) -> bool:
        """Give every slot a page for its last token; False if that took a page away from another slot."""
        running, undisturbed = self.running, True
        while True:
            active = running.num_active
            needy = np.flatnonzero((running.lengths[:active] - 1) // self.pool.page_size >= running.num_pages[:active])
            if not len(needy):
                return undisturbed
            for slot in needy[np.argsort(running.ages[needy])].tolist():
                page = self.pool.allocate()
                if page is None:
                    self._preempt_age(running.ages[:active].max())
                    undisturbed = False
                    break
                running.add_page(slot, page)

    def _preempt_age(self, age: int) -> None:
        slot = int(np.flatnonzero(self.running.ages[: self.running.num_active] == age)[0])
        generated = self.running.generated(slot)
        self._give_back_pages(slot)
        request = self.running.release(slot)
        self._waiting.appendleft(_waiting(replace(request, generated=generated if len(generated) else None)))
        self.num_preempted += 1

    def _admit(self) -> None:
        held_back: list[_Waiting] = []
        while self._waiting and self.running.num_active < self.running.max_num_seqs:
            entry = self._waiting.popleft()
            if self._uses_prefixes(entry.request) and entry.prefix.tobytes() in self._prefilling:
                held_back.append(entry)  # a sibling is computing this prefix: use it in a moment
            elif not self._try_admit(entry):
                self._waiting.appendleft(entry)
                break
        self._waiting.extendleft(reversed(held_back))

    def _uses_prefixes(self, request: GenerationRequest) -> bool:
        return self._prefix_caching and not request.score_prompt

    def _try_admit(self, entry: _Waiting) -> bool:
        """Give the request a slot and pages for its whole prefix, if there is room."""
        pool, prefix = self.pool, entry.prefix
        known = pool.find(prefix) if self._uses_prefixes(entry.request) else None
        end = known.end if known else None
        # Without the logits of its end, the last token of the prefix must be computed again.
        shared = (
            known.pages[: len(prefix) // pool.page_size if end else (len(prefix) - 1) // pool.page_size]
            if known
            else ()
        )
        for page in shared:
            pool.share(page)
        num_new = -(-len(prefix) // pool.page_size) - len(shared)
        # Each running slot may soon need another page; without this margin, admissions would preempt each other.
        margin = self.running.num_active
        if pool.num_available < num_new + margin:
            for page in reversed(shared):
                pool.release(page)
            return False
        slot = self.running.admit(entry.request, prefix, self._epoch)
        new_pages = [new for _ in range(num_new) if (new := pool.allocate()) is not None]
        for page in (*shared, *new_pages):
            self.running.add_page(slot, page)
        if end:
            self.running.num_cached[slot] = len(prefix)
            self._cached_logits.append((slot, end.logits))
            if new_pages:
                self._copies.append((end.page, new_pages[0]))
        else:
            self.running.num_cached[slot] = len(shared) * pool.page_size
            if self._uses_prefixes(entry.request):
                self._prefilling.add(prefix.tobytes())
        return True

    def _plan(self) -> StepPlan:
        running, active = self.running, self.running.num_active
        num_cached, prefix_lengths = running.num_cached[:active], running.prefix_lengths[:active]
        decoding = np.flatnonzero((num_cached >= prefix_lengths) & (num_cached < running.lengths[:active]))
        chunks = tuple(self._chunks(prefix_lengths - num_cached, len(decoding)))
        slot_parts, position_parts = [decoding], [running.lengths[decoding] - 1]
        for chunk in chunks:
            length = chunk.stop - chunk.start
            slot_parts.append(np.full(length, chunk.slot))
            position_parts.append(np.arange(chunk.first_position, chunk.first_position + length))
        all_slots = np.concatenate(slot_parts) if chunks else decoding
        positions = np.concatenate(position_parts) if chunks else position_parts[0]
        page_size = self.pool.page_size
        pages = running.tables[all_slots, positions // page_size].astype(np.int64)
        finished = [
            chunk
            for chunk in chunks
            if chunk.first_position + chunk.stop - chunk.start == running.prefix_lengths[chunk.slot]
            and running.max_lengths[chunk.slot] > running.prefix_lengths[chunk.slot]
        ]
        scored = self._scored(positions, chunks)
        ready, self._cached_logits = self._cached_logits, []
        plan = StepPlan(
            token_ids=running.token_ids[all_slots, positions].astype(np.int64),
            positions=positions,
            slots=all_slots,
            slot_mapping=pages * page_size + positions % page_size,
            num_decode=len(decoding),
            chunks=chunks,
            max_length=int(positions[: len(decoding)].max()) + 1 if len(decoding) else 0,
            sampled_slots=np.concatenate(
                [decoding, np.array([*(chunk.slot for chunk in finished), *(slot for slot, _ in ready)], np.int64)]
            ),
            logits_index=np.concatenate(
                [np.arange(len(decoding)), np.array([chunk.stop - 1 for chunk in finished], np.int64), scored]
            ),
            scored_slots=all_slots[scored],
            scored_positions=positions[scored] + 1,
            cached_logits=tuple(logits for _, logits in ready),
            copies=tuple(self._copies),
        )
        self._copies.clear()
        return plan

    def _chunks(self, missing: Int64Array, num_decode: int) -> Iterator[Chunk]:
        """Prefill, oldest slot first, as far as the step's tokens go."""
        running = self.running
        prefilling = np.flatnonzero(missing > 0)
        start, stop = num_decode, max(self._max_batched_tokens, num_decode + self.pool.page_size)
        num_scorable = self._max_scored_tokens
        for slot in prefilling[np.argsort(running.ages[prefilling])].tolist():
            if start == stop:
                return
            end = min(start + int(missing[slot]), stop)
            if running.is_scoring(slot):
                end = min(end, start + num_scorable)
                num_scorable -= end - start
            if start < end:
                yield Chunk(slot, start, end, int(running.num_cached[slot]))
            start = end

    def _scored(self, positions: Int64Array, chunks: Sequence[Chunk]) -> Int64Array:
        """Which of the step's tokens have a prompt token after them that is to be scored."""
        scored = [np.zeros(0, np.int64)]
        for chunk in chunks:
            if self.running.is_scoring(chunk.slot):
                read = np.arange(chunk.start, chunk.stop)
                scored.append(read[positions[read] < self.running.prompt_lengths[chunk.slot] - 1])
        return np.concatenate(scored)

    def _remember_prefix(self, slot: int, logits: Tensor) -> None:
        """A prefill is complete: siblings may use it, if one version of the weights computed it."""
        if not self._prefix_caching:
            return
        prefix = self.running.token_ids[slot, : self.running.prefix_lengths[slot]]
        self._prefilling.discard(prefix.tobytes())
        if self.running.epochs[slot] == self._epoch:
            self.pool.remember(prefix, self.running.pages(slot), logits.clone())

    def _give_back_pages(self, slot: int) -> None:
        running = self.running
        if self._prefix_caching:
            self._prefilling.discard(running.token_ids[slot, : running.prefix_lengths[slot]].tobytes())
            if running.epochs[slot] == self._epoch:
                self.pool.remember(running.token_ids[slot, : running.num_cached[slot]], running.pages(slot))
        # Last pages first: of idle pages the longest idle is reused first, and a page is useless without its parents.
        for page in reversed(running.pages(slot)):
            self.pool.release(page)


def _waiting(request: GenerationRequest) -> _Waiting:
    parts = [request.prompt_token_ids, *([request.generated.token_ids] if request.generated else [])]
    return _Waiting(request, np.concatenate(parts).astype(np.int32))
