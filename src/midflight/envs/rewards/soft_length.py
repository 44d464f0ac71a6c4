"""A penalty that grows near a limit of length."""

from __future__ import annotations

from typing import Literal

from midflight.errors import RecipeError
from midflight.types import Problem


class SoftLength:
    """Reward 0 up to `limit - buffer`, then a linear descent to -1 at `limit`, and -1 beyond.

    The unit is "characters" or "words": rewards see text. For a penalty in tokens, use `reward.overlong_buffer`.
    Source: DAPO, eq. 13.
    """

    def __init__(self, *, limit: int, buffer: int, unit: Literal["characters", "words"] = "characters") -> None:
        if unit not in ("characters", "words"):
            raise RecipeError(f"task.rewards: soft_length: unit = {unit!r}; 'characters' or 'words' would work")
        if not 0 < buffer <= limit:
            raise RecipeError(
                f"task.rewards: soft_length: buffer = {buffer} is out of range; 1 to limit = {limit} would work"
            )
        self._limit, self._buffer, self._unit = limit, buffer, unit

    def __call__(self, problem: Problem, response: str) -> float:
        length = len(response) if self._unit == "characters" else len(response.split())
        return -min(1.0, max(0.0, (length - self._limit + self._buffer) / self._buffer))
