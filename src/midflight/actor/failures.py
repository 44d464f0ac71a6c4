"""Errors in the user's code: one line that says what and where, the traceback once, and counts by reason."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from pathlib import Path

import midflight

_MAX_REASON = 500  # characters: it goes into a log line and, at worst, into the one line that ends the run
_MAX_REASONS = 16  # that are told apart, in counts and in a log
_OTHER_REASONS = "other reasons"
_OURS = str(Path(midflight.__file__).parent) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))

logger = logging.getLogger(__name__)
_logged: set[str] = set()


def reason_of(error: BaseException) -> str:
    """The error in one line, with the place in the user's code that it is from, if there is one."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # their own exception, which cannot even say what it is
        text = "(it has no text)"
    place = _place_of(error)
    return f"{type(error).__name__}: {text}"[: _MAX_REASON - len(place)] + place


def log_once(error: BaseException) -> None:
    """Log the traceback of an error in the user's code, unless this process has logged one like it."""
    if not _place_of(error):
        return
    kind = _kind(reason_of(error))
    if kind not in _logged and len(_logged) < _MAX_REASONS:
        _logged.add(kind)
        logger.warning("the first error of this kind: %s", reason_of(error), exc_info=error)


def count_failure(counts: dict[str, int], reason: str) -> None:
    """Add one to the reason's count. Errors of one type at one place are one reason; their texts may differ."""
    kind = _kind(reason)
    known = next((each for each in counts if _kind(each) == kind), reason)
    if known not in counts and len(counts) >= _MAX_REASONS:
        known = _OTHER_REASONS
    counts[known] = counts.get(known, 0) + 1


def _place_of(error: BaseException) -> str:
    """ " (file:line)" of the last frame in the user's code: the last outside libraries, else the first outside ours."""
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
    """The type of the error, and its place."""
    return f"{reason.partition(':')[0]}{reason.rpartition(' (')[2]}"
