"""Resuming a run: the files that its processes left must fit together, and fit the recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from midflight.actor.partials import PartialBuffer
from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RunDirectoryError, StreamError
from midflight.launch.streams import open_batches, open_groups, open_scores, open_unscored, scoring_workers
from midflight.models.directory import check_same_model
from midflight.protocols import Stream
from midflight.trainer.checkpoints import load_state, newest_checkpoint, newest_whole_checkpoint
from midflight.trainer.state import TrainerState
from midflight.types import ActorCheckpoint, ActorState, Rollout, RolloutStatus, Segment


def prepare_to_resume(run: RunDirectory, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Set damaged checkpoints aside and repair streams that lost their ends, before any process is started.

    After a power failure, a stream may lack records that a later stage has processed. Such a stream continues at the
    position of the later stage. Groups of lost batches that were not trained on are open again.
    Raises: ModelError if the newest checkpoint is of another model; RunDirectoryError if a stream cannot be used;
    CheckpointError if every checkpoint is damaged.
    """
    processed = 0
    if checkpoint := newest_whole_checkpoint(run.checkpoints, report):
        check_same_model(checkpoint, recipe.model.path)
        processed = load_state(checkpoint).version
    try:
        for name, stream in _streams(run, recipe):
            with contextlib.closing(stream):
                end = stream.next_offset()
                if not _can_continue_at(stream, processed):
                    report(f"the stream of {name} has lost records around {processed}; it continues there")
                    stream.skip_to(processed)
                    end = processed
                processed = end
        for worker in scoring_workers(recipe)[1:]:
            _align_scores(run, recipe, worker)
    except StreamError as error:
        raise RunDirectoryError(str(error)) from error


def _align_scores(run: RunDirectory, recipe: Recipe, worker: int) -> None:
    """Let a preprocessing process score the next group; the scores of groups that it skips are made with the batch."""
    with (
        contextlib.closing(open_unscored(run, recipe, worker)) as unscored,
        contextlib.closing(open_scores(run, recipe, worker)) as scores,
    ):
        end = scores.next_offset()
        if not _can_continue_at(unscored, end):
            unscored.skip_to(end)


def _can_continue_at(stream: Stream[Any], offset: int) -> bool:
    """Return True if the stream holds the record at `offset`, or would append it next."""
    try:
        return bool(stream.read(offset, timeout_s=0)) or stream.next_offset() == offset
    except StreamError:  # past the end, or trimmed because the next stage had processed the record
        return False


def actor_checkpoint(run: RunDirectory, recipe: Recipe) -> ActorCheckpoint | None:
    """Checkpoint from which the actor of this run resumes, or would resume; None to start from the beginning."""
    checkpoint = newest_checkpoint(run.checkpoints)
    trained = load_state(checkpoint) if checkpoint else TrainerState()
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(contextlib.closing(stream)) for _, stream in _streams(run, recipe)]
        partials = stack.enter_context(contextlib.closing(PartialBuffer(run.partials)))
        return restored_actor(partials, streams, trained)


def restored_actor(
    partials: PartialBuffer, streams: Sequence[Stream[Any]], trained: TrainerState
) -> ActorCheckpoint | None:
    """Return the actor's state after the last batch handed over, with the rollouts of its open groups.

    `streams` go from the trainer back to the actor. If a batch was handed over after the last save of the buffer, the
    state comes from that batch; saved rollouts of groups still open are kept. If a stream lost batches since the save,
    tokens of weight versions made from the lost batches are cut off.
    """
    saved, num_batches = partials.load(), streams[-1].next_offset()
    if saved and saved.state.num_batches == num_batches:
        return saved
    if num_batches == 0:
        return None
    state = _state_after(num_batches, streams, trained)
    still_open = set(state.open_group_ids)
    rollouts = [rollout for rollout in saved.rollouts if rollout.group_id in still_open] if saved else []
    return ActorCheckpoint(state, [_cut(rollout, newest_version=num_batches) for rollout in rollouts])


def _cut(rollout: Rollout, newest_version: int) -> Rollout:
    """Cut the rollout before its first token of a newer version: training makes those versions from other batches."""
    segments: list[Segment] = []
    for segment in rollout.segments:
        # Versions never decrease along a rollout.
        num_kept = int(np.count_nonzero(segment.tokens.weight_versions <= newest_version))
        if num_kept or not segment.sampled:
            segments.append(replace(segment, tokens=segment.tokens.part(0, num_kept)))
        if num_kept < len(segment):
            break
    else:
        return rollout
    partial = Rollout(rollout.rollout_id, rollout.group_id, RolloutStatus.PARTIAL, segments)
    partial.num_carried = min(rollout.num_carried, partial.num_sampled)
    return partial


def _state_after(num_batches: int, streams: Sequence[Stream[Any]], trained: TrainerState) -> ActorState:
    if trained.version == num_batches:
        return trained.actor
    *others, handed_over = streams
    for stream in others:  # a stream that was moved past its lost end has no such record
        if stream.next_offset() == num_batches:
            with contextlib.suppress(StreamError):
                return _last_record(stream, num_batches)
    return _last_record(handed_over, num_batches)


def _last_record(stream: Stream[Any], end: int) -> ActorState:
    state: ActorState = stream.read(end - 1, timeout_s=0)[0].actor_state
    return state


def _streams(run: RunDirectory, recipe: Recipe) -> list[tuple[str, Stream[Any]]]:
    """Streams and their names, from the trainer back to the actor."""
    streams: list[tuple[str, Stream[Any]]] = [("batches", open_batches(run, recipe))]
    if recipe.num_preprocess_workers:
        streams.append(("groups", open_groups(run, recipe)))
    return streams
