"""Totals of a whole run, stored in its checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from midflight.metrics.lag import merge_histograms
from midflight.types import ActorState, Int32Array, TrainingBatch

_HISTOGRAMS = ("lag_histogram", "generated_lengths", "trained_lengths", "dropped_lengths")  # JSON keys are strings


@dataclass(slots=True)
class TrainerState:
    """The trainer's counts over a whole run, interruptions included."""

    version: int = 0  # optimizer steps; also the offset of the next batch
    samples: int = 0  # rollouts trained on
    trained_tokens: int = 0  # response tokens of these rollouts
    trained_groups: int = 0
    wall_s: float = 0.0
    lag_histogram: dict[int, int] = field(default_factory=dict)  # optimizer steps -> response tokens
    # Response length in tokens -> rollouts:
    generated_lengths: dict[int, int] = field(default_factory=dict)
    trained_lengths: dict[int, int] = field(default_factory=dict)
    dropped_lengths: dict[int, int] = field(default_factory=dict)
    # State after the last trained batch: the run can resume from it even if its streams are lost.
    actor: ActorState = field(default_factory=ActorState)

    def count(self, batch: TrainingBatch) -> None:
        """Add a batch that was trained on."""
        self.version += 1
        self.samples += batch.num_rollouts
        self.trained_tokens += batch.num_response_tokens
        self.trained_groups += len(batch.group_ids)
        self.lag_histogram = merge_histograms([self.lag_histogram, batch.lag_histogram])
        _count_values(self.generated_lengths, batch.generated_lengths)
        _count_values(self.trained_lengths, batch.trained_lengths)
        _count_values(self.dropped_lengths, batch.dropped_lengths)
        self.actor = batch.actor_state

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainerState:
        """Raises: ValueError, KeyError, TypeError or AttributeError if the text is damaged."""
        values = json.loads(text)
        for name in _HISTOGRAMS:
            values[name] = {int(key): count for key, count in values[name].items()}
        return cls(**values | {"actor": ActorState(**values["actor"])})


def _count_values(histogram: dict[int, int], values: Int32Array) -> None:
    for value in values.tolist():
        histogram[value] = histogram.get(value, 0) + 1
