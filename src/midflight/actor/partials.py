"""The partial-rollout buffer: what the actor holds, in a SQLite file that outlives the process.

    rollouts   one row per rollout of an open group: what it is, without its tokens
    tokens     its tokens in pieces with checksums, each written once: a long rollout's cost as much as a short one's
    actor      one row: the actor's counts

Every `save` is one transaction, so what is read back is the actor as it was at one moment. Killing the process loses
nothing that was saved; a loss of power may undo the last saves, as it may those of the streams.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from midflight.errors import StreamError
from midflight.streams.codec import Codec
from midflight.types import ActorCheckpoint, ActorState, GeneratedTokens, Rollout, RolloutId, RolloutStatus

_BUSY_TIMEOUT_S = 30.0
_TABLES = """
CREATE TABLE IF NOT EXISTS actor (id INTEGER PRIMARY KEY CHECK (id = 0), state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (rollout_id INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
    rollout_id INTEGER, start INTEGER, piece BLOB NOT NULL, PRIMARY KEY (rollout_id, start)
) WITHOUT ROWID;
"""
# A rollout's progress but for its tokens: a row is written again only when this changes.
_Progress = tuple[RolloutStatus, bool, int]


class PartialBuffer:
    """The buffer at `path`, created if there is none. One actor writes it.

    Raises: StreamError if the file is damaged or cannot be written; what was saved before stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rollouts, self._pieces, self._states = Codec(Rollout), Codec(GeneratedTokens), Codec(ActorState)
        self._saved: dict[RolloutId, tuple[_Progress, int]] = {}  # and the number of its tokens
        with self._errors():
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)

    def load(self) -> ActorCheckpoint | None:
        """The actor as it was last saved, everything in flight as partial rollouts; None if it never was."""
        with self._errors():
            row = self._db.execute("SELECT state FROM actor").fetchone()
            records = self._db.execute("SELECT record FROM rollouts ORDER BY rollout_id").fetchall()
            if row is None:
                return None
            rollouts = [self._with_tokens(self._rollouts.decode(record)) for (record,) in records]
            return ActorCheckpoint(self._states.decode(row[0]), rollouts)

    def save(
        self,
        state: ActorState,
        open_rollouts: Iterable[Rollout],
        tokens_of: Callable[[Rollout, int], GeneratedTokens],
    ) -> None:
        """Make the file hold this state, these rollouts and no others; `tokens_of(rollout, n)` are all but its first n.

        Writes what is new since the last save of this object; its first one replaces all that an earlier one left.
        """
        saved: dict[RolloutId, tuple[_Progress, int]] = {}
        with self._errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if not self._saved:
                self._db.execute("DELETE FROM rollouts")
                self._db.execute("DELETE FROM tokens")
            for rollout in open_rollouts:
                saved[rollout.rollout_id] = self._save_rollout(rollout, tokens_of)
            gone = [(rollout_id,) for rollout_id in self._saved.keys() - saved.keys()]
            self._db.executemany("DELETE FROM rollouts WHERE rollout_id = ?", gone)
            self._db.executemany("DELETE FROM tokens WHERE rollout_id = ?", gone)
            self._db.execute("INSERT OR REPLACE INTO actor VALUES (0, ?)", (self._states.encode(state),))
        self._saved = saved

    def close(self) -> None:
        self._db.close()

    def _save_rollout(
        self, rollout: Rollout, tokens_of: Callable[[Rollout, int], GeneratedTokens]
    ) -> tuple[_Progress, int]:
        known, num_tokens = self._saved.get(rollout.rollout_id, (None, 0))
        progress = (rollout.status, rollout.finish_reason is not None, rollout.num_carried)
        if progress != known:
            record = self._rollouts.encode(replace(rollout, generated=GeneratedTokens.none()))
            self._db.execute("INSERT OR REPLACE INTO rollouts VALUES (?, ?)", (rollout.rollout_id, record))
        new = tokens_of(rollout, num_tokens)
        if len(new):
            piece = self._pieces.encode(new)
            self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (rollout.rollout_id, num_tokens, piece))
        return progress, num_tokens + len(new)

    def _with_tokens(self, rollout: Rollout) -> Rollout:
        """Raises: StreamError if a piece is damaged, or one is missing before another."""
        pieces, num_tokens = [GeneratedTokens.none()], 0
        for start, message in self._db.execute(
            "SELECT start, piece FROM tokens WHERE rollout_id = ? ORDER BY start", (rollout.rollout_id,)
        ):
            if start != num_tokens:
                raise StreamError(f"rollout {rollout.rollout_id} lacks its tokens {num_tokens} to {start}")
            pieces.append(self._pieces.decode(message))
            num_tokens += len(pieces[-1])
        generated = GeneratedTokens(
            np.concatenate([piece.token_ids for piece in pieces]),
            np.concatenate([piece.logprobs for piece in pieces]),
            np.concatenate([piece.weight_versions for piece in pieces]),
        )
        if rollout.status is RolloutStatus.RUNNING and rollout.finish_reason is None:
            return replace(rollout, status=RolloutStatus.PARTIAL, generated=generated, num_carried=num_tokens)
        return replace(rollout, generated=generated)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, StreamError) as error:
            raise StreamError(f"{self._path}: {error}") from error
