"""Scheduler: admission, chunked prefill, page allocation and preemption. No tensor operations happen here.

A sequence has `lengths` tokens, of which `num_cached` have cached keys and values. It starts with a prefix: the prompt
and any tokens generated before an interruption. The prefix is prefilled in chunks, so that decoding slots never wait
for a long prefill. After the prefill, each step decodes one token. If pages run out, the youngest sequence is
preempted: it keeps its tokens, frees its pages, and is prefilled again when there is room. The oldest sequence can
always finish.
"""

from __future__ import annotations

from collections import OrderedDict
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
    """Plans each step and records its results. Requests that do not run yet wait in a queue."""

    def __init__(
        self,
        running: RunningBatch,
        pool: PagePool[Tensor],
        max_batched_tokens: int,
        prefix_caching: bool,
        max_scored_tokens: int,
    ) -> None:
        """Create a scheduler over a running batch and a page pool.

        `max_scored_tokens`: largest number of prompt tokens to score in one step.
        """
        self.running, self.pool = running, pool
        self._max_batched_tokens, self._max_scored_tokens = max_batched_tokens, max_scored_tokens
        self._prefix_caching = prefix_caching
        self._waiting = OrderedDict[RolloutId, _Waiting]()
        self._ids: set[RolloutId] = set()  # rollouts in a slot or in the queue
        self._prefilling: set[bytes] = set()  # prefixes in prefill; queued requests with the same prefix wait for them
        self._cached_logits: list[tuple[int, Tensor]] = []  # (slot, next logits) of slots admitted with a full hit
        self._copies: list[tuple[int, int]] = []  # (source page, target page) for the next plan
        self._epoch = 0  # number of weight updates so far
        self.num_preempted = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._ids)

    def __contains__(self, rollout_id: RolloutId) -> bool:
        return rollout_id in self._ids

    def add(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self._ids.add(request.rollout_id)
        self._waiting[request.rollout_id] = _waiting(request)

    def generated(self, rollout_id: RolloutId, start: int) -> GeneratedTokens:
        """Return the tokens of a rollout in flight so far, from response position `start` on."""
        slot = self.running.slot_of.get(rollout_id)
        if slot is not None:
            return self.running.generated(slot, start)
        return (self._waiting[rollout_id].request.generated or GeneratedTokens.none()).part(start)

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Remove these rollouts and return their tokens; ignore ids that are not in flight."""
        aborted = dict.fromkeys(rollout_ids)
        entries = [entry for rollout_id in aborted if (entry := self._waiting.pop(rollout_id, None)) is not None]
        completions = [
            Completion(entry.request.rollout_id, entry.request.generated or GeneratedTokens.none(), FinishReason.ABORT)
            for entry in entries
        ]
        self._ids -= {completion.rollout_id for completion in completions}
        for rollout_id in aborted.keys() & self.running.slot_of.keys():
            completions.append(self.release(self.running.slot_of[rollout_id], FinishReason.ABORT))
        return completions

    def weights_changed(self, recompute: bool) -> None:
        """Empty the prefix cache; preempt slots that are scoring a prompt or, if `recompute`, all slots."""
        self._epoch += 1
        self.pool.forget()
        running = self.running
        ages = [int(running.ages[slot]) for slot in range(running.num_active) if recompute or running.is_scoring(slot)]
        for age in sorted(ages, reverse=True):
            self._preempt_age(age)

    def plan(self) -> StepPlan | None:
        """Plan the next step; return None if nothing is in flight."""
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
        """Record the results of a step; return the completions of sequences that have ended.

        `token_ids`, `logprobs`: one for each of plan.sampled_slots. `scores`: one for each of plan.scored_slots.
        `logits`: rows of the forward pass that were sampled from, without cached logits.
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
            if running.num_cached[chunk.slot] == running.max_lengths[chunk.slot]  # the request only scores its prompt
        ]
        # From the last slot down, because `release` moves the last slot into the released one.
        return [self.release(slot, reason) for slot, reason in sorted(ended, key=lambda pair: -pair[0])]

    def release(self, slot: int, reason: FinishReason) -> Completion:
        """Free a slot and its pages and return the completion of its sequence."""
        running = self.running
        generated, prompt = running.generated(slot), running.scored_prompt(slot)
        self._give_back_pages(slot)
        request = running.release(slot)
        self._ids.remove(request.rollout_id)
        return Completion(request.rollout_id, generated, reason, prompt)

    def _make_room(self) -> bool:
        """Give every slot a page for its last token; return False if another slot was preempted for a page."""
        running, no_preemption = self.running, True
        while True:
            active = running.num_active
            needy = np.flatnonzero((running.lengths[:active] - 1) // self.pool.page_size >= running.num_pages[:active])
            if not len(needy):
                return no_preemption
            for slot in needy[np.argsort(running.ages[needy])].tolist():
                page = self.pool.allocate()
                if page is None:
                    self._preempt_age(running.ages[:active].max())
                    no_preemption = False
                    break
                running.add_page(slot, page)

    def _preempt_age(self, age: int) -> None:
        slot = int(np.flatnonzero(self.running.ages[: self.running.num_active] == age)[0])
        generated = self.running.generated(slot)
        self._give_back_pages(slot)
        request = self.running.release(slot)
        self._put_first(_waiting(replace(request, generated=generated if len(generated) else None)))
        self.num_preempted += 1

    def _admit(self) -> None:
        held_back: list[_Waiting] = []
        while self._waiting and self.running.num_active < self.running.max_num_seqs:
            _, entry = self._waiting.popitem(last=False)
            if self._uses_prefixes(entry.request) and entry.prefix.tobytes() in self._prefilling:
                held_back.append(entry)  # a sibling is computing this prefix, which is then in the prefix cache
            elif not self._try_admit(entry):
                self._put_first(entry)
                break
        for entry in reversed(held_back):
            self._put_first(entry)

    def _put_first(self, entry: _Waiting) -> None:
        self._waiting[entry.request.rollout_id] = entry
        self._waiting.move_to_end(entry.request.rollout_id, last=False)

    def _uses_prefixes(self, request: GenerationRequest) -> bool:
        return self._prefix_caching and not request.score_prompt

    def _try_admit(self, entry: _Waiting) -> bool:
        """Give the request a slot and pages for its whole prefix; return False if there is no room."""
        pool, prefix = self.pool, entry.prefix
        cached = pool.find(prefix) if self._uses_prefixes(entry.request) else None
        end = cached.end if cached else None
        # Without cached logits, the last token of the prefix must be computed again.
        shared = (
            cached.pages[: len(prefix) // pool.page_size if end else (len(prefix) - 1) // pool.page_size]
            if cached
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
        """Distribute the remaining tokens of the step over prefills, oldest sequence first."""
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
        """Return the indices of the step's tokens whose logits score the prompt token that follows."""
        scored = [np.zeros(0, np.int64)]
        for chunk in chunks:
            if self.running.is_scoring(chunk.slot):
                indices = np.arange(chunk.start, chunk.stop)
                scored.append(indices[positions[indices] < self.running.prompt_lengths[chunk.slot] - 1])
        return np.concatenate(scored)

    def _remember_prefix(self, slot: int, logits: Tensor) -> None:
        """Add a completed prefill to the prefix cache, if one version of the weights computed all of it."""
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
        # Last pages first: the page that has been idle longest is reused first, and a page is useless without the pages
        # before it.
        for page in reversed(running.pages(slot)):
            self.pool.release(page)


def _waiting(request: GenerationRequest) -> _Waiting:
    parts = [request.prompt_token_ids, *([request.generated.token_ids] if request.generated else [])]
    return _Waiting(request, np.concatenate(parts).astype(np.int32))
