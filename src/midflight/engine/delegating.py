"""Delegation of a Generator's members to another Generator."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.protocols import Generator
from midflight.types import Completion, GeneratedTokens, GenerationRequest, RolloutId


class DelegatingGenerator:
    """Implements Generator except `step` by another generator; a base class."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def weight_version(self) -> int:
        return self._generator.weight_version

    @property
    def num_in_flight(self) -> int:
        return self._generator.num_in_flight

    @property
    def num_engines(self) -> int:
        return self._generator.num_engines

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._generator.add(requests)

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        return self._generator.generated(rollout_id, start)

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        return self._generator.abort(rollout_ids)

    def adopt(self, version: int) -> None:
        self._generator.adopt(version)
