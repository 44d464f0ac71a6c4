"""Who computes what in the next step: admission, chunked prefill, pages, preemption. No tensors are touched here.

A row has `lengths` tokens, of which `num_cached` have keys and values. It starts with a prefix, its prompt and what was
generated before it was interrupted, whose prefill is done in chunks so that decoding rows never wait for a long one.
From then on one token is missing: a decode. When pages run out the youngest row gives its own back and waits; its
tokens stay, and it is prefilled again when there is room. The oldest row can always finish.

A prompt that is to be scored is read from its first token on, whatever is known of it, since its logits are wanted. New
weights make it start again: one version scores all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from midflight.engine.pages import PagePool
from midflight.engine.plan import Chunk, StepPlan
from midflight.engine.rows import RowTable
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
        rows: RowTable,
        pool: PagePool[Tensor],
        max_batched_tokens: int,
        prefix_caching: bool,
        max_scored_tokens: int,
    ) -> None:
        """`max_scored_tokens`: of prompts, in one step."""
        self.rows, self.pool = rows, pool
        self._max_batched_tokens, self._max_scored_tokens = max_batched_tokens, max_scored_tokens
        self._prefix_caching = prefix_caching
        self._waiting: deque[_Waiting] = deque()
        self._ids: set[RolloutId] = set()  # in a row or waiting
        self._prefilling: set[bytes] = set()  # prefixes that siblings in the queue wait for
        self._cached_logits: list[tuple[int, Tensor]] = []  # (row, its next logits) of those just admitted
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
        row = self.rows.row_of.get(rollout_id)
        if row is not None:
            return self.rows.generated(row, start)
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
        for rollout_id in aborted & self.rows.row_of.keys():
            completions.append(self.release(self.rows.row_of[rollout_id], FinishReason.ABORT))
        return completions

    def weights_changed(self, recompute: bool) -> None:
        """No known prefix may be used again; with `recompute`, nor may the keys and values of running rows."""
        self._epoch += 1
        self.pool.forget()
        rows = self.rows
        again = [int(rows.ages[row]) for row in range(rows.num_active) if recompute or rows.is_scoring(row)]
        for age in sorted(again, reverse=True):
            self._preempt_age(age)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run: nothing is in flight."""
        if self._make_room():
            self._admit()
        return self._plan() if self.rows.num_active else None

    def record(
        self,
        plan: StepPlan,
        logits: Tensor | None,
        token_ids: Int32Array,
        logprobs: Float32Array,
        scores: Float32Array,
        version: int,
    ) -> list[Completion]:
        """Take in what the step computed: a token for each of plan.sampled_rows, a score for each of plan.scored_rows.

        `logits`: those of plan.logits_index that were sampled from.
        """
        rows = self.rows
        decoded = plan.rows[: plan.num_decode]
        rows.num_cached[decoded] += 1
        for chunk in plan.chunks:
            rows.prefilled(chunk.row, chunk.stop - chunk.start, version)
        rows.logprobs[plan.scored_rows, plan.scored_positions] = scores
        if logits is not None:
            for index in range(plan.num_decode, len(logits)):
                self._remember_prefix(int(plan.sampled_rows[index]), logits[index])
        ended = rows.append(plan.sampled_rows, token_ids, logprobs, version)
        ended += [
            (chunk.row, FinishReason.LENGTH)
            for chunk in plan.chunks
            if rows.num_cached[chunk.row] == rows.max_lengths[chunk.row]  # nothing was to be sampled
        ]
        # From the last row down: a released row is filled from the end.
        return [self.release(row, reason) for row, reason in sorted(ended, key=lambda pair: -pair[0])]

    def release(self, row: int, reason: FinishReason) -> Completion:
        rows = self.rows
        generated, prompt = rows.generated(row), rows.scored_prompt(row)
        self._give_back_pages(row)
        request = rows.release(row)
        self._ids.remove(request.rollout_id)
        return Completion(request.rollout_id, generated, reason, prompt)

    def _make_room(self) -> bool:
        """Give every row a page for its last token; False if that took a page away from another row."""
        rows, undisturbed = self.rows, True
        while True:
            active = rows.num_active
            needy = np.flatnonzero((rows.lengths[:active] - 1) // self.pool.page_size >= rows.num_pages[:active])
            if not len(needy):
                return undisturbed
            for row in needy[np.argsort(rows.ages[needy])].tolist():
                page = self.pool.allocate()
                if page is None:
                    self._preempt_age(rows.ages[:active].max())
                    undisturbed = False
                    break
                rows.add_page(row, page)

    def _preempt_age(self, age: int) -> None:
        row = int(np.flatnonzero(self.rows.ages[: self.rows.num_active] == age)[0])
        generated = self.rows.generated(row)
        self._give_back_pages(row)
        request = self.rows.release(row)
        self._waiting.appendleft(_waiting(replace(request, generated=generated if len(generated) else None)))
        self.num_preempted += 1

    def _admit(self) -> None:
        held_back: list[_Waiting] = []
        while self._waiting and self.rows.num_active < self.rows.num_rows:
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
        """Give the request a row and pages for its whole prefix, if there is room."""
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
        # Each running row may soon need another page; without this margin, admissions would preempt each other.
        margin = self.rows.num_active
        if pool.num_available < num_new + margin:
            for page in reversed(shared):
                pool.release(page)
            return False
        row = self.rows.admit(entry.request, prefix, self._epoch)
        new_pages = [new for _ in range(num_new) if (new := pool.allocate()) is not None]
        for page in (*shared, *new_pages):
            self.rows.add_page(row, page)
        if end:
            self.rows.num_cached[row] = len(prefix)
            self._cached_logits.append((row, end.logits))
            if new_pages:
                self._copies.append((end.page, new_pages[0]))
        else:
            self.rows.num_cached[row] = len(shared) * pool.page_size
            if self._uses_prefixes(entry.request):
                self._prefilling.add(prefix.tobytes())
        return True

    def _plan(self) -> StepPlan:
        rows, active = self.rows, self.rows.num_active
        num_cached, prefix_lengths = rows.num_cached[:active], rows.prefix_lengths[:active]
        decoding = np.flatnonzero((num_cached >= prefix_lengths) & (num_cached < rows.lengths[:active]))
        chunks = tuple(self._chunks(prefix_lengths - num_cached, len(decoding)))
        row_parts, position_parts = [decoding], [rows.lengths[decoding] - 1]
        for chunk in chunks:
            length = chunk.stop - chunk.start
            row_parts.append(np.full(length, chunk.row))
            position_parts.append(np.arange(chunk.first_position, chunk.first_position + length))
        all_rows = np.concatenate(row_parts) if chunks else decoding
        positions = np.concatenate(position_parts) if chunks else position_parts[0]
        page_size = self.pool.page_size
        pages = rows.tables[all_rows, positions // page_size].astype(np.int64)
        finished = [
            chunk
            for chunk in chunks
            if chunk.first_position + chunk.stop - chunk.start == rows.prefix_lengths[chunk.row]
            and rows.max_lengths[chunk.row] > rows.prefix_lengths[chunk.row]
        ]
        scored = self._scored(positions, chunks)
        ready, self._cached_logits = self._cached_logits, []
        plan = StepPlan(
            token_ids=rows.token_ids[all_rows, positions].astype(np.int64),
            positions=positions,
            rows=all_rows,
            slots=pages * page_size + positions % page_size,
            num_decode=len(decoding),
            chunks=chunks,
            max_length=int(positions[: len(decoding)].max()) + 1 if len(decoding) else 0,
            sampled_rows=np.concatenate(
                [decoding, np.array([*(chunk.row for chunk in finished), *(row for row, _ in ready)], np.int64)]
            ),
            logits_index=np.concatenate(
                [np.arange(len(decoding)), np.array([chunk.stop - 1 for chunk in finished], np.int64), scored]
            ),
            scored_rows=all_rows[scored],
            scored_positions=positions[scored] + 1,
            cached_logits=tuple(logits for _, logits in ready),
            copies=tuple(self._copies),
        )
        self._copies.clear()
        return plan

    def _chunks(self, missing: Int64Array, num_decode: int) -> Iterator[Chunk]:
        """Prefill, oldest row first, as far as the step's tokens go."""
        rows = self.rows
        prefilling = np.flatnonzero(missing > 0)
        start, stop = num_decode, max(self._max_batched_tokens, num_decode + self.pool.page_size)
        num_scorable = self._max_scored_tokens
        for row in prefilling[np.argsort(rows.ages[prefilling])].tolist():
            if start == stop:
                return
            end = min(start + int(missing[row]), stop)
            if rows.is_scoring(row):
                end = min(end, start + num_scorable)
                num_scorable -= end - start
            if start < end:
                yield Chunk(row, start, end, int(rows.num_cached[row]))
            start = end

    def _scored(self, positions: Int64Array, chunks: Sequence[Chunk]) -> Int64Array:
        """Which of the step's tokens have a prompt token after them that is to be scored."""
        scored = [np.zeros(0, np.int64)]
        for chunk in chunks:
            if self.rows.is_scoring(chunk.row):
                read = np.arange(chunk.start, chunk.stop)
                scored.append(read[positions[read] < self.rows.prompt_lengths[chunk.row] - 1])
        return np.concatenate(scored)

    def _remember_prefix(self, row: int, logits: Tensor) -> None:
        """A prefill is complete: siblings may use it, if one version of the weights computed it."""
        if not self._prefix_caching:
            return
        prefix = self.rows.token_ids[row, : self.rows.prefix_lengths[row]]
        self._prefilling.discard(prefix.tobytes())
        if self.rows.epochs[row] == self._epoch:
            self.pool.remember(prefix, self.rows.pages(row), logits.clone())

    def _give_back_pages(self, row: int) -> None:
        rows = self.rows
        if self._prefix_caching:
            self._prefilling.discard(rows.token_ids[row, : rows.prefix_lengths[row]].tobytes())
            if rows.epochs[row] == self._epoch:
                self.pool.remember(rows.token_ids[row, : rows.num_cached[row]], rows.pages(row))
        # Last pages first: of idle pages the longest idle is reused first, and a page is useless without its parents.
        for page in reversed(rows.pages(row)):
            self.pool.release(page)


def _waiting(request: GenerationRequest) -> _Waiting:
    parts = [request.prompt_token_ids, *([request.generated.token_ids] if request.generated else [])]
    return _Waiting(request, np.concatenate(parts).astype(np.int32))
