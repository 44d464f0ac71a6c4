"""Pages never leak, alias or go stale under random load, checked against a model of the cache contents."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from midflight.engine.pages import PagePool
from midflight.engine.running_batch import RunningBatch
from midflight.engine.scheduler import Scheduler
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId, SamplingParams
from soak import SOAK

PAGE = 4
MAX_PROMPT, MAX_NEW = 14, 12
MAX_PAGES = -(-(MAX_PROMPT + MAX_NEW) // PAGE)
STOP = 3


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, aborts, updates and steps, with few pages and few distinct prompts."""

    @initialize(
        max_num_seqs=st.integers(1, 6),
        spare_pages=st.integers(0, 20),
        max_batched_tokens=st.integers(1, 24),
        prefix_caching=st.booleans(),
        max_scored_tokens=st.integers(1, 24),
    )
    def start(
        self, max_num_seqs: int, spare_pages: int, max_batched_tokens: int, prefix_caching: bool, max_scored_tokens: int
    ) -> None:
        self.num_pages = 1 + MAX_PAGES + spare_pages
        self.pool: PagePool[object] = PagePool(self.num_pages, PAGE)
        self.running = RunningBatch(max_num_seqs, MAX_PROMPT + MAX_NEW, MAX_PAGES)
        self.scheduler = Scheduler(
            self.running,
            self.pool,  # type: ignore[arg-type]
            max_batched_tokens,
            prefix_caching,
            max_scored_tokens,
        )
        self.max_scored_tokens = max_scored_tokens
        # Content of every cache slot: the tokens up to and including its own, and the version that wrote it.
        self.slots: dict[int, tuple[bytes, int]] = {}
        self.version = 0
        self.asked: dict[RolloutId, GenerationRequest] = {}
        self.rng = np.random.default_rng(0)
        self.next_id = 0

    @rule(
        prompt=st.integers(0, 3),
        length=st.integers(1, MAX_PROMPT),
        max_tokens=st.integers(1, MAX_NEW),
        score=st.booleans(),
    )
    def add(self, prompt: int, length: int, max_tokens: int, score: bool) -> None:
        self._add(prompt, length, max_tokens, score)

    @rule(prompt=st.integers(0, 3), length=st.integers(1, MAX_PROMPT + MAX_NEW))
    def add_prompt_to_score(self, prompt: int, length: int) -> None:
        self._add(prompt, length, 0, True)

    def _add(self, prompt: int, length: int, max_tokens: int, score: bool) -> None:
        # Prompts of one kind are prefixes of each other.
        token_ids = (np.arange(length, dtype=np.int32) * (prompt + 1)) % 3
        sampling = SamplingParams(max_tokens, 1.0, (STOP,))
        request = GenerationRequest(RolloutId(self.next_id), token_ids, sampling, 0, score_prompt=score)
        self.next_id += 1
        self.asked[request.rollout_id] = request
        self.scheduler.add(request)

    @rule(data=st.data(), resume=st.booleans())
    @precondition(lambda self: self.asked)
    def abort(self, data: st.DataObject, resume: bool) -> None:
        rollout_id = data.draw(st.sampled_from(sorted(self.asked)))
        (completion,) = self.scheduler.abort([rollout_id])
        request = self.asked.pop(rollout_id)
        assert completion.finish_reason is FinishReason.ABORT
        if resume:
            generated = completion.generated if len(completion.generated) else None
            again = replace(request, generated=generated)
            self.asked[rollout_id] = again
            self.scheduler.add(again)

    @rule(recompute=st.booleans())
    def update(self, recompute: bool) -> None:
        self.version += 1
        self.scheduler.weights_changed(recompute)
        if recompute:
            assert self.running.num_active == 0

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for completion in self._step():
                self._check_completion(completion)

    def _step(self) -> list[Completion]:
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.asked
            return []
        copied = {source: [self.slots.get(source * PAGE + i) for i in range(PAGE)] for source, _ in plan.copies}
        for source, target in plan.copies:
            for i, content in enumerate(copied[source]):
                self.slots.pop(target * PAGE + i, None)
                if content is not None:
                    self.slots[target * PAGE + i] = content
        assert len(set(plan.slot_mapping.tolist())) == len(plan.slot_mapping), "two tokens of one step share a slot"
        assert not plan.slot_mapping.size or plan.slot_mapping.min() >= PAGE, "the scratch page was given out"
        for row, position, slot in zip(plan.slots, plan.positions, plan.slot_mapping, strict=True):
            self.slots[int(slot)] = (self.running.token_ids[row, : position + 1].tobytes(), self.version)
        assert len(plan.scored_slots) == len(plan.scored_positions) <= self.max_scored_tokens
        num_logits = len(plan.logits_index) - len(plan.scored_slots)
        scored_after = plan.logits_index[num_logits:]
        assert plan.slots[scored_after].tolist() == plan.scored_slots.tolist()
        assert (plan.positions[scored_after] + 1).tolist() == plan.scored_positions.tolist()
        assert num_logits + len(plan.cached_logits) == len(plan.sampled_slots)
        for cached, row in zip(plan.cached_logits, plan.sampled_slots[num_logits:], strict=True):
            length = self.running.lengths[row]
            assert cached.clone() == (self.running.token_ids[row, :length].tobytes(), self.version)
        sampled = self.rng.integers(0, 4, len(plan.sampled_slots)).astype(np.int32)
        logits = _Logits(
            (self.running.token_ids[row, : self.running.lengths[row]].tobytes(), self.version)
            for row in plan.sampled_slots[:num_logits]
        )
        self._check_contents(plan.slots, plan.positions)
        logprobs, scores = np.zeros(len(sampled), np.float32), self._scores(plan.scored_positions, self.version)
        return self.scheduler.record(plan, cast(Tensor, logits), sampled, logprobs, scores, self.version)

    @staticmethod
    def _scores(positions: np.ndarray, version: int) -> np.ndarray:
        """Return scores that encode their position and version."""
        return (version * 100 + positions).astype(np.float32)

    def _check_contents(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Check the cache slots that computed tokens attend to: written for these tokens, none older than the epoch."""
        for row in set(rows.tolist()):
            last = int(positions[rows == row].max())
            versions = set()
            for position in range(last + 1):
                slot = int(self.running.tables[row, position // PAGE]) * PAGE + position % PAGE
                tokens, version = self.slots[slot]
                assert tokens == self.running.token_ids[row, : position + 1].tobytes()
                versions.add(version)
            assert min(versions) >= self.running.epochs[row]

    def _check_completion(self, completion: Completion) -> None:
        request = self.asked.pop(completion.rollout_id)
        token_ids = completion.generated.token_ids
        assert (completion.prompt is not None) == request.score_prompt
        if completion.prompt is not None:
            (version,) = set(completion.prompt.weight_versions.tolist())
            assert completion.prompt.token_ids.tolist() == request.prompt_token_ids.tolist()
            expected = self._scores(np.arange(1, len(request.prompt_token_ids)), version)
            assert completion.prompt.logprobs[1:].tolist() == expected.tolist()
        if not request.sampling.max_tokens:
            assert completion.finish_reason is FinishReason.LENGTH
            assert not len(token_ids)
            return
        assert 0 < len(token_ids) <= request.sampling.max_tokens
        stopped = completion.finish_reason is FinishReason.STOP
        assert stopped == (token_ids[-1] == STOP)
        assert (token_ids[:-1] != STOP).all()
        assert stopped or len(token_ids) == request.sampling.max_tokens
        if request.generated:
            assert token_ids[: len(request.generated)].tolist() == request.generated.token_ids.tolist()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "running"):
            return
        users = [0] * self.num_pages
        for row in range(self.running.num_active):
            for page in self.running.pages(row):
                users[page] += 1
        assert users == self.pool.num_users
        assert users[0] == 0
        assert self.pool.num_available == sum(count == 0 for count in users[1:])
        assert self.scheduler.num_in_flight == len(self.asked)

    def teardown(self) -> None:
        """Finish every request and check that all pages are free."""
        if not hasattr(self, "running"):
            return
        for _ in range(20_000):
            if not self.asked:
                break
            self.step(1)
        assert not self.asked
        self.every_page_is_accounted_for()
        assert self.pool.num_available == self.num_pages - 1


class _Logits:
    """Stand-in for logits [R, V]: row i holds the tokens and the version it depends on."""

    def __init__(self, rows: object) -> None:
        self._rows = [_Row(row) for row in rows]  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> _Row:
        return self._rows[index]


class _Row(tuple):  # type: ignore[type-arg]
    def clone(self) -> _Row:
        return self


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150 * SOAK, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 2), min_size=1, max_size=20))
@settings(max_examples=150 * SOAK, deadline=None)
def test_prefix_lookup_finds_the_longest_common_prefix(first: list[int], second: list[int]) -> None:
    pool: PagePool[str] = PagePool(20, PAGE)
    pages = [page for _ in range(-(-len(first) // PAGE)) if (page := pool.allocate())]
    pool.remember(np.array(first, np.int32), pages, "logits")
    found = pool.find(np.array(second, np.int32))
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert list(found.pages) == pages[: common // PAGE]
    assert (found.end is not None) == (first == second)
    pool.forget()
    assert pool.find(np.array(first, np.int32)).pages == ()
