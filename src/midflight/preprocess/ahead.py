"""Scoring ahead: the reference scores a group as soon as the group is finished, before a batch is chosen from it.

    rollout process ──► unscored 0 ───────────────────────────► worker 0, which also builds the batches
                    └─► unscored 1 ──► worker 1 ──► scores 1 ──────┘

Group g is in the share of worker g modulo the number of workers. All of this only saves time: the record of a chosen
batch holds its groups, and worker 0 scores the groups that have no scores when it builds the batch. Such a group found
its stream full, or its scores were lost with a killed process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.preprocess.batches import Preprocessing
from midflight.preprocess.scoring import GroupScorer, digest_of, group_to_score
from midflight.protocols import Stream
from midflight.tracing.spans import Tracer
from midflight.types import (
    ActorState,
    ChosenBatch,
    Float32Array,
    GroupId,
    GroupScores,
    GroupToScore,
    RolloutGroup,
    RolloutId,
)

_MAX_RECORDS = 64  # scores per read


class SendAhead:
    """The end of the rollout process: sends every finished group to the worker of its share, if there is room."""

    def __init__(self, shares: Sequence[Stream[GroupToScore]], preprocessing: Preprocessing, tracer: Tracer) -> None:
        self._shares, self._preprocessing, self._tracer = shares, preprocessing, tracer

    def __call__(self, group: RolloutGroup) -> None:
        unscored = group_to_score(group, self._preprocessing)
        if unscored.sequences:
            with self._tracer.span("send", group=group.group_id):
                self._shares[group.group_id % len(self._shares)].append(unscored, timeout_s=0)


@dataclass(slots=True)
class OtherWorker:
    """The streams of a worker other than worker 0, as worker 0 reads them."""

    share: Stream[GroupToScore]
    scores: Stream[GroupScores]
    position: int = 0  # in both streams


class AheadOfBatches:
    """Scores for the batches that this process builds: its own share, those of other workers, and missing ones."""

    def __init__(
        self,
        scorer: GroupScorer,
        preprocessing: Preprocessing,
        tracer: Tracer,
        own: Stream[GroupToScore] | None = None,
        others: Sequence[OtherWorker] = (),
    ) -> None:
        """Without `own`, no group is scored ahead.

        Groups and scores that are in the streams already are not read: a process that was killed may have used them.
        """
        self._scorer, self._preprocessing, self._tracer = scorer, preprocessing, tracer
        self._own, self._others = own, others
        self._own_position = own.next_offset() if own else 0
        for other in others:
            other.position = other.scores.next_offset()
        self._scores: dict[tuple[GroupId, bytes], GroupScores] = {}
        self._next_group_id, self._open = GroupId(0), frozenset[GroupId]()  # after the last batch

    def score_next(self) -> bool:
        """Score the next group of the own share; return False if there is none."""
        groups = self._own.read(self._own_position, timeout_s=0) if self._own else []
        if not self._own or not groups:
            return False
        self._own_position += 1
        self._own.trim(self._own_position)
        if self._is_open(groups[0].group_id):
            self._keep(self._scorer.score(groups[0]))
        return True

    def scores_of(
        self, chosen: ChosenBatch, should_stop: Callable[[], bool]
    ) -> Mapping[RolloutId, Float32Array] | None:
        """Return the scores of a batch by rollout; None if a stop request came first."""
        scores: dict[RolloutId, Float32Array] = {}
        for group in chosen.groups:
            unscored = group_to_score(group, self._preprocessing)
            if not unscored.sequences:
                continue
            found = self._find(unscored, should_stop)
            if found is None:
                return None
            scores |= zip((each.rollout_id for each in unscored.sequences), found.logprobs, strict=True)
        return scores

    def forget(self, state: ActorState) -> None:
        """Forget the scores of groups that are not open in `state`: they are in a batch, or were dropped."""
        self._next_group_id, self._open = state.next_group_id, frozenset(state.open_group_ids)
        self._scores = {key: scores for key, scores in self._scores.items() if self._is_open(key[0])}

    def _find(self, unscored: GroupToScore, should_stop: Callable[[], bool]) -> GroupScores | None:
        key = unscored.group_id, digest_of(unscored)
        number = unscored.group_id % (1 + len(self._others))
        if number:
            other = self._others[number - 1]
            end = other.share.next_offset()  # a group that was sent is before it: batches are chosen later
            while key not in self._scores and other.position < end:
                if should_stop():
                    return None
                if not self._read(other, timeout_s=0) and not self.score_next():
                    with self._tracer.span("wait"):
                        self._read(other, WAIT_SLICE_S)
        if should_stop():
            return None
        if key not in self._scores:
            self._keep(self._scorer.score(unscored))
        return self._scores[key]

    def _read(self, other: OtherWorker, timeout_s: float) -> bool:
        """Read scores of another worker; return False if there were none in time."""
        records = other.scores.read(other.position, _MAX_RECORDS, timeout_s)
        if records:
            other.position += len(records)
            other.scores.trim(other.position)
        for record in records:
            self._keep(record)
        return bool(records)

    def _keep(self, scores: GroupScores) -> None:
        self._scores[scores.group_id, scores.digest] = scores

    def _is_open(self, group_id: GroupId) -> bool:
        return group_id >= self._next_group_id or group_id in self._open
