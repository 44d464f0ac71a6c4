"""Which member of a pool gets which of the requests that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from midflight.generation.members import Member
from midflight.types import GenerationRequest, Int32Array, RolloutId

# A member may have so many rollouts more than another, so that the siblings of a group share their prompt's prefill.
_SIBLINGS_AHEAD = 4


class Placement:
    """The member with the fewest requests gets the next one; siblings stay together within limits."""

    def __init__(self) -> None:
        self._newest_prompt: tuple[Int32Array, Member] | None = None

    def assign(
        self, waiting: Mapping[RolloutId, GenerationRequest], members: Sequence[Member], newest_version: int
    ) -> dict[Member, list[GenerationRequest]]:
        """Requests for each member, those that were started first first.

        Invariants: a request goes to a member whose weights are no older than the tokens it has. If the trainer lost
        the weights that sampled these, `newest_version` is new enough.
        """
        batches: dict[Member, list[GenerationRequest]] = {}
        for rollout_id in sorted(waiting) if members else ():
            request = waiting[rollout_id]
            oldest = min(newest_version, newest_version_of(request))
            able = [member for member in members if (member.version or 0) >= oldest]
            if able:
                batches.setdefault(self._choose(request, able, batches), []).append(request)
        return batches

    def _choose(
        self, request: GenerationRequest, able: Sequence[Member], batches: Mapping[Member, Sequence[Any]]
    ) -> Member:
        """The member with the fewest requests, or that of the newest sibling."""

        def load(member: Member) -> int:
            return len(member.requests) + len(batches.get(member, ()))

        chosen = min(able, key=load)
        if self._newest_prompt is not None:
            prompt, member = self._newest_prompt
            is_sibling = np.array_equal(prompt, request.prompt_token_ids)
            if is_sibling and member in able and load(member) < load(chosen) + _SIBLINGS_AHEAD:
                chosen = member
        self._newest_prompt = request.prompt_token_ids, chosen
        return chosen


def newest_version_of(request: GenerationRequest) -> int:
    """Newest weights that sampled a token it comes with: no older ones may sample the next."""
    return max(request.prompt_version, int(request.generated.weight_versions.max()) if request.generated else 0)
