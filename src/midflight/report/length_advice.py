"""Advice to raise `sampling.max_tokens`, if most of the first responses are cut off there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from midflight.metrics.jsonl import MetricsLine

_NUM_FIRST = 64  # responses
_MOST = 0.5


class LengthAdvice:
    """Says once, as soon as enough responses were trained on, that more than half of them were cut off.

    Later responses are not counted: a policy may learn to be brief, or to be long.
    """

    def __init__(self, max_tokens: int, say: Callable[[str], None]) -> None:
        self._max_tokens, self._say = max_tokens, say
        self._num_responses, self._num_cut_off = 0, 0.0

    def update(self, lines: Sequence[MetricsLine]) -> None:
        for line in lines:
            if self._num_responses >= _NUM_FIRST:
                return
            num_responses = len(line.get("length/by_rollout", ()))
            self._num_responses += num_responses
            self._num_cut_off += num_responses * (line.get("length/clipped_fraction") or 0.0)
            if self._num_responses >= _NUM_FIRST and self._num_cut_off > _MOST * self._num_responses:
                self._say(
                    f"{self._num_cut_off:.0f} of the first {self._num_responses} responses were cut off at"
                    f" sampling.max_tokens = {self._max_tokens}; a larger sampling.max_tokens, or a prompt that asks"
                    " for a shorter answer, would let them end"
                )
