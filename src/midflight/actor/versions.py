"""How many weight versions the rollouts in flight have tokens of, without looking at their tokens."""

from __future__ import annotations

from midflight.types import Rollout, RolloutId


class VersionCounter:
    """Is told what starts and ends, and asked often; new weights it notices by itself."""

    def __init__(self) -> None:
        self._version = -1  # the newest one seen
        self._num_swaps = 0
        self._before_swaps: dict[RolloutId, int] = {}  # versions of a rollout, less the swaps before it was started

    def most(self, version: int) -> int:
        """Of any rollout in flight, if `version` samples its next token; 0 if there is none."""
        self._see(version)
        return max(self._before_swaps.values(), default=-self._num_swaps) + self._num_swaps

    def started(self, rollout: Rollout, version: int) -> None:
        self._see(version)
        num_versions = len({version, *rollout.generated.weight_versions.tolist()})
        self._before_swaps[rollout.rollout_id] = num_versions - self._num_swaps

    def ended(self, rollout: Rollout) -> None:
        del self._before_swaps[rollout.rollout_id]

    def _see(self, version: int) -> None:
        self._num_swaps += version != self._version
        self._version = version
