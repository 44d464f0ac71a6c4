"""The end of a response at its stop string, for engines that know none.

An engine without stop rules samples on: the tokens after the end are dropped here, and the caller aborts the request.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from midflight.generation.driver import Progress
from midflight.models.stopping import StringStopRule
from midflight.types import FinishReason, Int32Array

# Largest chunk of a request with stop strings: such an engine samples at most this many tokens too many.
STOP_CHUNK_TOKENS = 16


class StopCut:
    """Cuts the progress of one response after the token that completes a stop string."""

    def __init__(self, rule: StringStopRule) -> None:
        self._rule = rule
        self._token_ids: Int32Array = np.zeros(0, np.int32)  # of the response so far

    def cut(self, progress: Progress) -> Progress:
        """Return the progress, with the finish reason and without the tokens after the end if it has a stop string."""
        start = len(self._token_ids)
        self._token_ids = np.concatenate([self._token_ids, progress.generated.token_ids])
        end = self._rule.first_end(self._token_ids, start)
        if end is None:
            return progress
        return replace(progress, generated=progress.generated.part(0, end + 1 - start), finish_reason=FinishReason.STOP)
