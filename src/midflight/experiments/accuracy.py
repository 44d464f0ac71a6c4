"""Time until a run reached each level of held-out sampled accuracy, from its checkpoints, evaluated after the run.

Times are of the run's clock. They include writing the checkpoints, but no evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midflight.trainer.checkpoints import load_state

LEVELS = (0.8, 0.85, 0.9)


def accuracy_figures(checkpoints: Sequence[Path], accuracy: Callable[[Path], float]) -> dict[str, Any]:
    """Return `seconds_to_accuracy`, `steps_to_accuracy` and `final_accuracy` of a run.

    The first two hold, for each level, the clock of the first checkpoint that reached it, or None. `final_accuracy` is
    the accuracy of the newest checkpoint, or None without checkpoints. `checkpoints` are evaluated in order up to the
    first that reaches the highest level; after that, only the newest is evaluated.
    Units: seconds; optimizer steps.
    """
    seconds: dict[str, float | None] = {str(level): None for level in LEVELS}
    steps: dict[str, int | None] = {str(level): None for level in LEVELS}
    figures: dict[str, Any] = {"seconds_to_accuracy": seconds, "steps_to_accuracy": steps, "final_accuracy": None}
    for checkpoint in checkpoints:
        if seconds[str(max(LEVELS))] is not None and checkpoint != checkpoints[-1]:
            continue
        measured, state = accuracy(checkpoint), load_state(checkpoint)
        figures["final_accuracy"] = measured
        for level in map(str, LEVELS):
            if measured >= float(level) and seconds[level] is None:
                seconds[level], steps[level] = state.wall_s, state.version
    return figures
