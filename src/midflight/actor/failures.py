"""Errors in the user's code: a one-line reason with its place, the traceback once, counts, and the end of a run."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections import deque
from pathlib import Path

import midflight
from midflight.errors import RolloutError

_MAX_REASON = 500  # characters; a reason goes into a log line, and may go into the line that ends the run
_NUM_RECENT = 256  # rollouts that are looked back at
_MIN_RECENT = 64  # fewer rollouts end no run, however many failed
_MAX_REASONS = 16  # different reasons in the counts and in a log
_OTHER_REASONS = "other reasons"
_OURS = str(Path(midflight.__file__).parent) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))

logger = logging.getLogger(__name__)
_logged: set[str] = set()


class RecentFailures:
    """Failures among the last 256 rollouts. A verifier that rarely works must end the run instead of eating it."""

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._reasons: deque[str] = deque(maxlen=_NUM_RECENT)  # "" for a rollout that did not fail
        self._num_failed = 0

    def note(self, reason: str) -> None:
        """Add a rollout, with the reason of its failure or "".

        Raises: RolloutError if more than `max_fraction` of at least 64 rollouts failed, or all of them.
        """
        if len(self._reasons) == _NUM_RECENT:
            self._num_failed -= bool(self._reasons[0])
        self._reasons.append(reason)
        self._num_failed += bool(reason)
        num_recent = len(self._reasons)
        if not reason or num_recent < _MIN_RECENT:
            return
        if self._num_failed > self._max_fraction * num_recent or self._num_failed == num_recent:
            counts: dict[str, int] = {}
            for failure in filter(None, self._reasons):
                count_failure(counts, failure)
            frequent, count = max(counts.items(), key=lambda item: item[1])
            raise RolloutError(
                f"{self._num_failed} of the last {num_recent} rollouts failed (task.max_failed_fraction ="
                f" {self._max_fraction:g}); the most frequent reason, {count} times: {frequent}"
            )


def reason_of(error: BaseException) -> str:
    """Return the error as one line, with its place in the user's code, if it has one."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the __str__ of a user's exception can fail, too
        text = "(it has no text)"
    place = _place_of(error)
    return f"{type(error).__name__}: {text}"[: _MAX_REASON - len(place)] + place


def log_once(error: BaseException) -> None:
    """Log the traceback of an error in the user's code, once per kind of error and process."""
    if not _place_of(error):
        return
    kind = _kind(reason_of(error))
    if kind not in _logged and len(_logged) < _MAX_REASONS:
        _logged.add(kind)
        logger.warning("the first error of this kind: %s", reason_of(error), exc_info=error)


def count_failure(counts: dict[str, int], reason: str) -> None:
    """Add one to the reason's count. Errors of one type at one place count as one reason; their texts may differ."""
    kind = _kind(reason)
    known = next((other for other in counts if _kind(other) == kind), reason)
    if known not in counts and len(counts) >= _MAX_REASONS:
        known = _OTHER_REASONS
    counts[known] = counts.get(known, 0) + 1


def _place_of(error: BaseException) -> str:
    """Return " (file:line)" of the last frame in the user's code, or "".

    The user's code is the last frame outside libraries, else the first frame outside midflight.
    """
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(("<", _OURS))
    ]
    if not frames:
        return ""
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    frame = users[-1] if users else frames[0]
    path, here = Path(frame.filename), Path.cwd()
    return f" ({path.relative_to(here) if path.is_relative_to(here) else path}:{frame.lineno})"


def _kind(reason: str) -> str:
    """Type and place of the error in a reason."""
    return f"{reason.partition(':')[0]}{reason.rpartition(' (')[2]}"
