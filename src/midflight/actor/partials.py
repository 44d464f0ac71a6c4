"""The partial-rollout buffer: the actor's rollouts and counts in a SQLite file that outlives the process.

    rollouts   one row per rollout of an open group: its state so far
    tokens     the tokens after the prompt, in pieces with checksums. Each piece is written once, so a token costs the
               same in a long rollout and in a short one
    actor      one row: the actor's counts

Prompts are not saved; they follow from the group's id. Every `save` is one transaction, so `load` returns the actor at
one moment. Killing the process loses nothing that was saved. A loss of power may undo the last saves, as in streams.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midflight.errors import StreamError
from midflight.streams.codec import Codec
from midflight.streams.database import Database
from midflight.types import (
    ActorCheckpoint,
    ActorState,
    FinishReason,
    GeneratedTokens,
    GroupId,
    Rollout,
    RolloutId,
    RolloutStatus,
    Segment,
)

_APPLICATION_ID = 0x4D465052  # "MFPR"
_TABLES = (
    "CREATE TABLE actor (id INTEGER PRIMARY KEY CHECK (id = 0), state BLOB NOT NULL)",
    "CREATE TABLE rollouts (rollout_id INTEGER PRIMARY KEY, group_id INTEGER, status TEXT, finish_reason TEXT,"
    " num_carried INTEGER, reward REAL, reward_components TEXT, failure TEXT)",
    "CREATE TABLE tokens (rollout_id INTEGER, start INTEGER, piece BLOB NOT NULL, crc INTEGER NOT NULL,"
    " PRIMARY KEY (rollout_id, start)) WITHOUT ROWID",
)
_NO_PROMPT = Segment.given(())
_PIECE = np.dtype([("token_ids", "<i4"), ("logprobs", "<f4"), ("weight_versions", "<i4"), ("sampled", "?")])


class _Saved(NamedTuple):
    """State of a rollout in the file."""

    status: RolloutStatus
    finish_reason: FinishReason | None
    num_carried: int
    num_tokens: int


class PartialBuffer:
    """The buffer at `path`, created if the file does not exist. Only one actor may write it.

    Raises: StreamError if the file is damaged or cannot be written; earlier saves stay.
    """

    def __init__(self, path: Path) -> None:
        self._states = Codec(ActorState)
        self._saved: dict[RolloutId, _Saved] | None = None  # None until the first save of this object
        self._db = Database(path, "a partial-rollout buffer", _APPLICATION_ID, _TABLES)

    def load(self) -> ActorCheckpoint | None:
        """Return the actor as last saved, with rollouts in flight as partial ones, or None if it was never saved.

        The rollouts have no prompts.
        """
        with self._db.errors(ValueError, StreamError):
            state = self._db.execute("SELECT state FROM actor").fetchone()
            rows = self._db.execute("SELECT * FROM rollouts ORDER BY rollout_id").fetchall()
            return (
                ActorCheckpoint(self._states.decode(state[0]), [self._rollout(*row) for row in rows]) if state else None
            )

    def save(
        self,
        state: ActorState,
        open_rollouts: Iterable[Rollout],
        tokens_of: Callable[[Rollout, int], Sequence[Segment]],
    ) -> None:
        """Make the file hold this state and exactly these rollouts.

        `tokens_of(rollout, n)` returns the tokens after the prompt, without the first n.
        Only changes since the last save of this object are written; its first save replaces everything in the file.
        """
        known = self._saved or {}
        saved: dict[RolloutId, _Saved] = {}
        rollouts: list[tuple[object, ...]] = []
        tokens: list[tuple[object, ...]] = []
        for rollout in open_rollouts:
            before = known.get(rollout.rollout_id)
            num_known = before.num_tokens if before else 0
            new = tokens_of(rollout, num_known)
            num_tokens = num_known + sum(map(len, new))
            now = _Saved(rollout.status, rollout.finish_reason, rollout.num_carried, num_tokens)
            saved[rollout.rollout_id] = now
            if before is None or before[:3] != now[:3]:
                rollouts.append(_row(rollout))
            if new:
                piece = _packed(new)
                tokens.append((rollout.rollout_id, num_known, piece, zlib.crc32(piece)))
        gone = [(rollout_id,) for rollout_id in known.keys() - saved.keys()]
        with self._db.transaction():
            if self._saved is None:
                self._db.execute("DELETE FROM rollouts")
                self._db.execute("DELETE FROM tokens")
            self._db.executemany("DELETE FROM rollouts WHERE rollout_id = ?", gone)
            self._db.executemany("DELETE FROM tokens WHERE rollout_id = ?", gone)
            self._db.executemany("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rollouts)
            self._db.executemany("INSERT INTO tokens VALUES (?, ?, ?, ?)", tokens)
            self._db.execute("INSERT OR REPLACE INTO actor VALUES (0, ?)", (self._states.encode(state),))
        self._saved = saved

    def close(self) -> None:
        self._db.close()

    def _rollout(
        self,
        rollout_id: int,
        group_id: int,
        status: str,
        finish_reason: str | None,
        num_carried: int,
        reward: float,
        reward_components: str,
        failure: str,
    ) -> Rollout:
        running = RolloutStatus(status) is RolloutStatus.RUNNING and finish_reason is None
        return Rollout(
            rollout_id=RolloutId(rollout_id),
            group_id=GroupId(group_id),
            status=RolloutStatus.PARTIAL if running else RolloutStatus(status),
            segments=[_NO_PROMPT, *self._segments(rollout_id)],
            finish_reason=FinishReason(finish_reason) if finish_reason else None,
            reward=reward,
            reward_components=json.loads(reward_components),
            failure=failure,
            num_carried=num_carried,
        )

    def _segments(self, rollout_id: int) -> list[Segment]:
        """Return the segments after the prompt. Raises: StreamError if a piece is damaged or missing."""
        pieces = b""
        for start, piece, crc in self._db.execute(
            "SELECT start, piece, crc FROM tokens WHERE rollout_id = ? ORDER BY start", (rollout_id,)
        ):
            if start * _PIECE.itemsize != len(pieces):
                raise StreamError(f"rollout {rollout_id} lacks tokens before its token {start}")
            if zlib.crc32(piece) != crc:
                raise StreamError(f"damaged tokens of rollout {rollout_id}, from token {start} on")
            pieces += piece
        tokens = np.frombuffer(pieces, _PIECE)
        ends = np.flatnonzero(np.diff(tokens["sampled"])) + 1  # given and sampled segments alternate
        return [_unpacked(part) for part in np.split(tokens, ends) if len(part)]


def segments_from(segments: Iterable[Segment], start: int) -> list[Segment]:
    """Return the segments without their first `start` tokens, counted over all segments."""
    rest: list[Segment] = []
    for segment in segments:
        if start < len(segment):
            rest.append(replace(segment, tokens=segment.tokens.part(start)))
        start = max(0, start - len(segment))
    return rest


def _row(rollout: Rollout) -> tuple[object, ...]:
    """Return the values of a row, in the order of the columns."""
    return (
        rollout.rollout_id,
        rollout.group_id,
        rollout.status.value,
        rollout.finish_reason.value if rollout.finish_reason else None,
        rollout.num_carried,
        rollout.reward,
        json.dumps(rollout.reward_components),
        rollout.failure,
    )


def _packed(segments: Sequence[Segment]) -> bytes:
    tokens = GeneratedTokens.joined([segment.tokens for segment in segments])
    piece = np.empty(len(tokens), _PIECE)
    piece["token_ids"] = tokens.token_ids
    piece["logprobs"] = tokens.logprobs
    piece["weight_versions"] = tokens.weight_versions
    piece["sampled"] = np.repeat([segment.sampled for segment in segments], list(map(len, segments)))
    return piece.tobytes()


def _unpacked(piece: npt.NDArray[np.void]) -> Segment:
    tokens = GeneratedTokens(
        token_ids=piece["token_ids"].astype(np.int32),
        logprobs=piece["logprobs"].astype(np.float32),
        weight_versions=piece["weight_versions"].astype(np.int32),
    )
    return Segment(tokens, sampled=bool(piece["sampled"][0]))
