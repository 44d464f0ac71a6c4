"""Going on with a run: what its processes left must fit together, and fit the recipe."""

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
from midflight.launch.streams import open_batches, open_groups
from midflight.models.loading import check_same_model
from midflight.protocols import Stream
from midflight.trainer.checkpoints import load_state, newest_checkpoint, newest_whole_checkpoint
from midflight.trainer.state import TrainerState
from midflight.types import ActorCheckpoint, ActorState, Rollout, RolloutStatus, Segment


def prepare_to_resume(run: RunDirectory, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Before any process is started: put damaged checkpoints aside, and streams that lost their ends where they belong.

    A loss of power may take records of one stream that others have gone past. Then it goes on where the next stage
    does. Groups that were in batches which nobody has any more, and were not trained on, are open again.
    Raises: ModelError if the newest checkpoint is of another model; RunDirectoryError if a stream cannot be used;
    CheckpointError if no checkpoint is whole.
    """
    passed = 0
    if checkpoint := newest_whole_checkpoint(run.checkpoints, report):
        check_same_model(checkpoint, recipe.model.path)
        passed = load_state(checkpoint).version
    try:
        for name, stream in _streams(run, recipe):
            with contextlib.closing(stream):
                end = stream.next_offset()
                if not _goes_on_at(stream, passed):
                    report(f"the stream of {name} has lost records around {passed}; it goes on there")
                    stream.skip_to(passed)
                    end = passed
                passed = end
    except StreamError as error:
        raise RunDirectoryError(str(error)) from error


def _goes_on_at(stream: Stream[Any], offset: int) -> bool:
    """Whether it has this record, or would get it next."""
    try:
        return bool(stream.read(offset, timeout_s=0)) or stream.next_offset() == offset
    except StreamError:  # past its end, or trimmed because what comes after it had it
        return False


def actor_checkpoint(run: RunDirectory, recipe: Recipe) -> ActorCheckpoint | None:
    """Where the actor of this run goes on, or would."""
    checkpoint = newest_checkpoint(run.checkpoints)
    trained = load_state(checkpoint) if checkpoint else TrainerState()
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(contextlib.closing(stream)) for _, stream in _streams(run, recipe)]
        partials = stack.enter_context(contextlib.closing(PartialBuffer(run.partials)))
        return restored_actor(partials, streams, trained)


def restored_actor(
    partials: PartialBuffer, streams: Sequence[Stream[Any]], trained: TrainerState
) -> ActorCheckpoint | None:
    """After the last batch that was handed over, with all rollouts that belong there; `streams` in reverse order.

    The buffer is as old as its last save. If a batch was handed over since then, its counts are of before that
    batch, and the batch itself says what they are; the rollouts of groups that were open then are still good. If a
    stream lost batches since then, the tokens of versions that came after those batches are cut off.
    """
    saved, num_batches = partials.load(), streams[-1].next_offset()
    if saved and saved.state.num_batches == num_batches:
        return saved
    if num_batches == 0:
        return None
    state = _state_after(num_batches, streams, trained)
    still_open = set(state.open_group_ids)
    rollouts = [each for each in saved.rollouts if each.group_id in still_open] if saved else []
    return ActorCheckpoint(state, [_cut(each, newest_version=num_batches) for each in rollouts])


def _cut(rollout: Rollout, newest_version: int) -> Rollout:
    """The rollout up to its first token of a newer version: such versions are made again, of other batches."""
    segments: list[Segment] = []
    for segment in rollout.segments:
        # Versions never fall along a rollout.
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
    for stream in others:  # what skipped its lost end has no such record
        if stream.next_offset() == num_batches:
            with contextlib.suppress(StreamError):
                return _last_record(stream, num_batches)
    return _last_record(handed_over, num_batches)


def _last_record(stream: Stream[Any], end: int) -> ActorState:
    state: ActorState = stream.read(end - 1, timeout_s=0)[0].actor_state
    return state


def _streams(run: RunDirectory, recipe: Recipe) -> list[tuple[str, Stream[Any]]]:
    """From the trainer back to the actor."""
    streams: list[tuple[str, Stream[Any]]] = [("batches", open_batches(run, recipe))]
    if recipe.preprocess.process == "own":
        streams.append(("groups", open_groups(run, recipe)))
    return streams
