"""When a run reached which held-out sampled accuracy, from its checkpoints, evaluated afterwards.

The clock is the run's own and includes writing the checkpoints; evaluation is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midflight.trainer.checkpoints import load_state

LEVELS = (0.8, 0.85, 0.9)


def accuracy_figures(checkpoints: Sequence[Path], accuracy: Callable[[Path], float]) -> dict[str, Any]:
    """`seconds_to_accuracy` and `steps_to_accuracy`: each level, and when a checkpoint first reached it, None if none
    did; and `final_accuracy`, the newest checkpoint's, None if there is none.

    `checkpoints` are evaluated in their order up to the first that reaches the highest level; then only the newest.
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
