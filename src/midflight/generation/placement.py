"""Placement of waiting requests on the members of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from midflight.generation.members import Member
from midflight.types import GenerationRequest, Int32Array, RolloutId

# Largest lead in requests that a member may get over another one to keep siblings together: they share one prefill.
_SIBLINGS_AHEAD = 4


class Placement:
    """Placement policy: the member with the fewest requests gets the next one; siblings stay together within limits.

    Members with a free slot come first, so that engines of different sizes are all kept busy.
    """

    def __init__(self) -> None:
        self._newest_prompt: tuple[Int32Array, Member] | None = None

    def assign(
        self, waiting: Mapping[RolloutId, GenerationRequest], members: Sequence[Member], newest_version: int
    ) -> dict[Member, list[GenerationRequest]]:
        """Return the requests for each member, in the order of their rollout ids.

        `newest_version`: the version that the members were last asked to adopt. A member that has got a newer one
        already gets requests only if no other member can run them, because an evaluation is of one version.
        Invariants: the chosen member has weights no older than the newest token of the request. If the trainer has lost
        the weights that sampled this token, `newest_version` is new enough.
        """
        batches: dict[Member, list[GenerationRequest]] = {}
        for rollout_id in sorted(waiting) if members else ():
            request = waiting[rollout_id]
            oldest = min(newest_version, newest_version_of(request))
            eligible = [member for member in members if member.version >= oldest]
            eligible = [member for member in eligible if member.version <= newest_version] or eligible
            if eligible:
                batches.setdefault(self._choose(request, eligible, batches), []).append(request)
        return batches

    def _choose(
        self, request: GenerationRequest, eligible: Sequence[Member], batches: Mapping[Member, Sequence[Any]]
    ) -> Member:
        """Choose the member of the newest sibling or, if its lead is too large, the member with the fewest requests."""

        def load(member: Member) -> int:
            return len(member.requests) + len(batches.get(member, ()))

        chosen = min(eligible, key=lambda member: (_is_full(member, load(member)), load(member)))
        if self._newest_prompt is not None:
            prompt, member = self._newest_prompt
            is_sibling = np.array_equal(prompt, request.prompt_token_ids)
            # A sibling must not wait for a slot while another member has a free one.
            has_slot = not _is_full(member, load(member)) or _is_full(chosen, load(chosen))
            if is_sibling and member in eligible and has_slot and load(member) < load(chosen) + _SIBLINGS_AHEAD:
                chosen = member
        self._newest_prompt = request.prompt_token_ids, chosen
        return chosen


def _is_full(member: Member, load: int) -> bool:
    return member.num_slots is not None and load >= member.num_slots


def newest_version_of(request: GenerationRequest) -> int:
    """Return the newest version that sampled a token of the request; older weights must not sample the next token."""
    return max(request.prompt_version, int(request.generated.weight_versions.max()) if request.generated else 0)
