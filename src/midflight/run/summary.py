"""`summary.json`: the whole run in one object, assembled from the files of the run directory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import StreamError
from midflight.launch.streams import open_batches, open_groups
from midflight.metrics.averages import mean_by_lag, mean_over, mismatch_of
from midflight.metrics.evaluations import best_version, read_evaluations, score_of
from midflight.metrics.jsonl import MetricsLine, iterate_metrics
from midflight.metrics.lag import lag_metrics
from midflight.metrics.lengths import length_bias
from midflight.protocols import Stream
from midflight.run.resuming import actor_checkpoint
from midflight.trainer.checkpoints import load_state, newest_checkpoint
from midflight.trainer.state import TrainerState
from midflight.types import ActorState

Record = TypeVar("Record")

# Metrics of a step that a summary needs. The rest of a long run would not fit into the memory of its supervisor.
_SUMMARIZED = (
    *("skipped", "versions_per_rollout/max", "mismatch/tokens", "mismatch/mean", "mismatch/max", "ess", "ess/by_lag"),
    *("lag/tokens_by_lag", "update/pause_s", "idle/generation_fraction", "idle/trainer_fraction", "time/step_s"),
    *("time/rollout_s", "memory/peak_bytes_by_rank", "carried_token_fraction", "length/sum", "padding_fraction"),
    "length/clipped_fraction",
)


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Number of groups by outcome; `started` is the sum of the other counts."""

    started: int = 0
    trained: int = 0
    dropped: int = 0  # by a rule the user chose
    failed: int = 0
    unfinished: int = 0

    def adds_up(self) -> bool:
        return self.started == self.trained + self.dropped + self.failed + self.unfinished


def summarize(
    run: RunDirectory, recipe: Recipe, eval_before: dict[str, Any] | None, eval_after: dict[str, Any] | None
) -> dict[str, Any]:
    """Summarize the whole run, including interruptions, as of the newest checkpoint."""
    checkpoint = newest_checkpoint(run.checkpoints)
    trainer = load_state(checkpoint) if checkpoint else TrainerState()
    actor = _actor_state(run, recipe)
    num_waiting_groups = _num_waiting_groups(run, recipe, trainer.version)
    lag = lag_metrics(trainer.lag_histogram)
    lines = _metrics(run, trainer.version)
    return {
        "run_directory": str(run.path),
        "eval_before": eval_before,
        "eval_after": eval_after,
        "evaluations": _evaluations(run),
        "train_wall_s": trainer.wall_s,
        "steps": trainer.version,
        "skipped_steps": sum(int(line["skipped"]) for line in lines),
        "samples": trainer.samples,
        "generated_tokens": actor.generated_tokens if actor else 0,
        "trained_tokens": trainer.trained_tokens,
        "updates": actor.num_updates if actor else 0,
        "aborted": actor.num_aborted if actor else 0,
        "versions_per_rollout_max": int(max((line["versions_per_rollout/max"] for line in lines), default=0)),
        "max_lag": int(lag.get("lag/max", 0)),
        "mean_lag": lag.get("lag/mean", 0.0),
        "mismatch": mismatch_of(lines),
        "ess_by_lag": mean_by_lag(lines, "ess"),
        "mean_ess": mean_over(lines, "ess", weights=None),
        "update_pause_s": mean_over(lines, "update/pause_s", weights=None),
        "idle": {
            "generation": mean_over(lines, "idle/generation_fraction", weights="time/step_s"),
            "trainer": mean_over(lines, "idle/trainer_fraction", weights="time/step_s"),
        },
        "peak_memory_bytes": lines[-1].get("memory/peak_bytes_by_rank") if lines else None,
        "rollout_s": sum((line["time/rollout_s"] for line in lines), 0.0),
        "carried_token_fraction": _carried_tokens(lines) / max(trainer.trained_tokens, 1),
        "old_token_fraction": lag.get("old_token_fraction", 0.0),
        "padding_fraction": mean_over(lines, "padding_fraction", weights=None),
        "clipped_fraction": mean_over(lines, "length/clipped_fraction", weights=None),
        "length_bias": length_bias(trainer.generated_lengths, trainer.trained_lengths, trainer.dropped_lengths),
        "dropped": {
            "filtered": actor.num_filtered_groups if actor else 0,
            "queue_full": actor.num_dropped_groups if actor else 0,
        },
        # Number of failed groups by reason, the most frequent reason first.
        "failures": dict(Counter(actor.failures).most_common()) if actor else {},
        "groups": asdict(_group_counts(trainer, actor, num_waiting_groups)),
    }


def _evaluations(run: RunDirectory) -> dict[str, Any]:
    """Score of each evaluated version (avg@k on the first set), and the tokens of evaluations during the run."""
    lines = read_evaluations(run.evaluations)
    return {
        "scores": {str(line["version"]): score_of(line) for line in lines},
        "best_version": best_version(lines),
        "generated_tokens": sum(line.get("generated_tokens", 0) for line in lines),
    }


def _metrics(run: RunDirectory, newest: int) -> list[MetricsLine]:
    """Return the summarized metrics of each step up to `newest`; [] if the run failed before its first step."""
    if not run.metrics.exists():
        return []
    lines = []
    for line in iterate_metrics(run.metrics):
        if line["version"] <= newest:
            line["length/sum"] = sum(line["length/by_rollout"])
            lines.append({key: line[key] for key in _SUMMARIZED if key in line})
    return lines


def _carried_tokens(lines: Sequence[MetricsLine]) -> float:
    """Number of trained tokens that were sampled before an interruption of their rollout."""
    return sum((line["carried_token_fraction"] * line["length/sum"] for line in lines), 0.0)


def _actor_state(run: RunDirectory, recipe: Recipe) -> ActorState | None:
    """Return the actor's state at its last save or batch handed over, whichever is later; None if there is neither."""
    checkpoint = actor_checkpoint(run, recipe) if run.partials.exists() else None
    return checkpoint.state if checkpoint else None


def _num_waiting_groups(run: RunDirectory, recipe: Recipe, trained: int) -> int:
    """Number of groups handed over and not yet trained on: in batches, or waiting for preprocessing."""
    if not run.partials.exists():
        return 0
    with contextlib.closing(open_batches(run, recipe)) as batches:
        num_batches = batches.next_offset()
        num_groups = sum(len(batch.group_ids) for batch in _records(batches, trained))
    if recipe.num_preprocess_workers:
        with contextlib.closing(open_groups(run, recipe)) as groups:
            num_groups += sum(len(chosen.groups) for chosen in _records(groups, num_batches))
    return num_groups


def _records(stream: Stream[Record], from_offset: int) -> list[Record]:
    """Return all records from `from_offset` on; none if the stream ends before it."""
    num_left = stream.next_offset() - from_offset
    return stream.read(from_offset, max_records=num_left, timeout_s=0) if num_left > 0 else []


def _group_counts(trainer: TrainerState, actor: ActorState | None, num_waiting_groups: int) -> GroupCounts:
    """Count groups by outcome.

    Raises: StreamError if the counts do not add up: this is a defect, and a summary must not hide it.
    """
    if actor is None:
        return GroupCounts()
    counts = GroupCounts(
        started=actor.next_group_id,
        trained=trainer.trained_groups,
        dropped=actor.num_dropped_groups + actor.num_filtered_groups,
        failed=actor.num_failed_groups,
        unfinished=len(actor.open_group_ids) + num_waiting_groups,
    )
    if not counts.adds_up():
        raise StreamError(f"the counts of groups do not add up: {counts}; this is a defect, please report it")
    return counts
