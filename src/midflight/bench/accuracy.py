"""When a run reached which held-out sampled accuracy, from its checkpoints, evaluated afterwards.

The clock is the run's own and includes writing the checkpoints; evaluation is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from midflight.trainer.checkpoints import load_state

LEVELS = (0.8, 0.85, 0.9)

SecondsToAccuracy = dict[str, float | None]


def never() -> SecondsToAccuracy:
    """No level was reached, or nobody looked."""
    return {str(level): None for level in LEVELS}


def seconds_to_accuracy(checkpoints: Sequence[Path], accuracy: Callable[[Path], float]) -> SecondsToAccuracy:
    """Each level, and the run's clock at the first checkpoint that reaches it; None if none of them does.

    `checkpoints` are evaluated in their order, no further than to the first that reaches the highest level.
    Units: seconds.
    """
    reached = never()
    for checkpoint in checkpoints:
        measured, wall_s = accuracy(checkpoint), load_state(checkpoint).wall_s
        for level in LEVELS:
            if measured >= level and reached[str(level)] is None:
                reached[str(level)] = wall_s
        if measured >= max(LEVELS):
            break
    return reached
