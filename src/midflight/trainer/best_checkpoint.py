"""The best checkpoint of a run, kept from pruning and named by the link `checkpoints/best`.

The evaluations of a run say which one it is. The trainer only reads them, so it never waits for an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from midflight.metrics.evaluations import best_version, read_evaluations
from midflight.trainer.checkpoints import checkpoint_of, checkpoints_in, version_of

_LINK = "best"


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best evaluated checkpoint in `checkpoints`, as of the file `evaluations`."""

    checkpoints: Path
    evaluations: Path
    every: int  # optimizer steps between evaluations

    def versions_to_keep(self) -> set[int]:
        """Versions of the best checkpoint, and of newer ones that are still to be evaluated."""
        newest = max((line["version"] for line in read_evaluations(self.evaluations)), default=0)
        versions = map(version_of, checkpoints_in(self.checkpoints))
        keep = {version for version in versions if version > newest and version % self.every == 0}
        best = self._best()
        return keep if best is None else {*keep, best}

    def update_link(self) -> None:
        """Let the link name the best checkpoint, if any was evaluated."""
        best = self._best()
        if best is None:
            return
        link, unfinished = self.checkpoints / _LINK, self.checkpoints / f".{_LINK}.partial"
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(checkpoint_of(self.checkpoints, best).name)
        unfinished.replace(link)

    def _best(self) -> int | None:
        available = set(map(version_of, checkpoints_in(self.checkpoints)))
        return best_version([line for line in read_evaluations(self.evaluations) if line["version"] in available])


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the checkpoint that the link names, or None."""
    link = checkpoints / _LINK
    return link.resolve() if link.is_dir() else None
