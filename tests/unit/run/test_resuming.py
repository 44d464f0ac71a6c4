"""Resuming a run after a power failure, or after manual changes in the run directory."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midflight.actor.partials import PartialBuffer, segments_from
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import ModelError, RunDirectoryError
from midflight.launch.streams import open_batches, open_groups, open_scores, open_unscored
from midflight.models.loading import load_model, load_tokenizer
from midflight.run.directory import create_run
from midflight.run.resuming import _cut, actor_checkpoint, prepare_to_resume
from midflight.streams.codec import SCHEMA_VERSION
from midflight.trainer.checkpoints import save_checkpoint
from midflight.trainer.state import TrainerState
from midflight.types import (
    ActorCheckpoint,
    ActorState,
    ChosenBatch,
    FinishReason,
    GeneratedTokens,
    GroupId,
    GroupScores,
    GroupToScore,
    Rollout,
    RolloutId,
    RolloutStatus,
    Segment,
    TrainingBatch,
)

RECIPE = SHIPPED_RECIPES["cpu_demo"]
NONE = np.zeros(0, np.int32)


def a_run(tmp_path: Path, *overrides: str) -> tuple[RunDirectory, Recipe]:
    recipe = load_recipe(RECIPE, [f"run.directory={tmp_path / 'run'}", *overrides])
    return create_run(recipe), recipe


def actor_after(num_batches: int) -> ActorState:
    """State of an actor with two groups per batch and two open groups."""
    start = 2 * num_batches
    return ActorState(GroupId(start + 2), [GroupId(start), GroupId(start + 1)], num_batches)


def batch(index: int) -> TrainingBatch:
    return TrainingBatch(
        index=index, group_ids=[GroupId(2 * index), GroupId(2 * index + 1)], microbatches=[[]], num_rollouts=8,
        num_loss_tokens=0, num_response_tokens=0, lag_histogram={}, lag_by_position=np.zeros(10, np.float32),
        generated_lengths=NONE, trained_lengths=NONE, has_gradient=NONE.astype(bool), dropped_lengths=NONE, metrics={},
        actor_state=actor_after(index + 1),
    )  # fmt: skip


def chosen(index: int) -> ChosenBatch:
    return ChosenBatch(index, [], [], [], {}, actor_after(index + 1))


def append_batches(run: RunDirectory, recipe: Recipe, indices: Sequence[int]) -> None:
    with closing(open_batches(run, recipe)) as stream:
        assert [stream.append(batch(index)) for index in indices] == list(indices)


def save_partials(
    run: RunDirectory, state: ActorState, tokens: Sequence[int], versions: Sequence[int] = (), **fields: object
) -> None:
    """Save one rollout of the newest open group, with these tokens."""
    group_id = state.open_group_ids[-1]
    token_ids = np.array(tokens, np.int32)
    weight_versions = np.array(versions, np.int32) if versions else np.zeros_like(token_ids)
    generated = GeneratedTokens(token_ids, np.zeros(len(tokens), np.float32), weight_versions)
    rollout = Rollout(RolloutId(4 * group_id), group_id, RolloutStatus.PARTIAL, [Segment.given(()), Segment(generated)])
    rollout = replace(rollout, **fields)  # type: ignore[arg-type]
    with closing(PartialBuffer(run.partials)) as partials:
        partials.save(state, [rollout], lambda saved, start: segments_from(saved.segments[1:], start))


def save_step(run: RunDirectory, recipe: Recipe, version: int) -> None:
    def save_model(directory: Path) -> None:
        model: Any = load_model(recipe.model.path)
        model.save_pretrained(directory)
        load_tokenizer(recipe.model.path).save_pretrained(directory)

    state = TrainerState(version=version, actor=actor_after(version))
    save_checkpoint(run.checkpoints, state, save_model, keep=2)


def resumed(run: RunDirectory, recipe: Recipe) -> tuple[list[str], ActorCheckpoint]:
    """Prepare to resume; return the lines for the user and the restored actor."""
    reports: list[str] = []
    prepare_to_resume(run, recipe, reports.append)
    restored = actor_checkpoint(run, recipe)
    assert restored
    return reports, restored


def test_a_stream_without_its_end_continues_at_the_checkpoint(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path)
    append_batches(run, recipe, range(3))
    save_step(run, recipe, 5)
    save_partials(run, actor_after(6), [1, 2, 3])  # after a batch that was lost before training
    reports, restored = resumed(run, recipe)
    assert reports == ["the stream of batches has lost records around 5; it continues there"]
    assert restored.state == actor_after(5)
    assert restored.rollouts == [], "its group was not open after batch 5"
    append_batches(run, recipe, [5])


def test_rollouts_of_open_groups_are_kept(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path)
    save_step(run, recipe, 5)
    save_partials(run, replace(actor_after(4), open_group_ids=[GroupId(10)]), [1, 2, 3])
    _, restored = resumed(run, recipe)
    assert [rollout.generated.token_ids.tolist() for rollout in restored.rollouts] == [[1, 2, 3]]


@pytest.mark.parametrize("num_carried", [1, 3])
@pytest.mark.parametrize("status", [RolloutStatus.RUNNING, RolloutStatus.PARTIAL, RolloutStatus.FINISHED])
def test_tokens_of_lost_weight_versions_are_cut(tmp_path: Path, status: RolloutStatus, num_carried: int) -> None:
    run, recipe = a_run(tmp_path)
    save_step(run, recipe, 5)
    ended = {} if status is RolloutStatus.PARTIAL else {"finish_reason": FinishReason.STOP, "reward": 1.0}
    state = replace(actor_after(8), open_group_ids=[GroupId(11)])
    save_partials(run, state, [1, 2, 3, 4], [4, 5, 6, 6], status=status, num_carried=num_carried, **ended)
    _, restored = resumed(run, recipe)
    (rollout,) = restored.rollouts
    assert rollout.generated.weight_versions.tolist() == [4, 5]
    assert rollout.generated.token_ids.tolist() == [1, 2]
    assert (rollout.status, rollout.finish_reason, rollout.reward) == (RolloutStatus.PARTIAL, None, 0.0)
    assert rollout.num_carried == min(num_carried, 2), "no more than the kept tokens"


@pytest.mark.parametrize(("newest", "expected"), [(7, [2, 1, 2]), (6, [2, 1, 1]), (5, [2, 1]), (4, [1])])
def test_segments_after_a_cut_are_removed(newest: int, expected: list[int]) -> None:
    def sampled(*versions: int) -> Segment:
        array = np.array(versions, np.int32)
        return Segment(GeneratedTokens(array, np.zeros(len(array), np.float32), array))

    turns = [Segment.given((1, 2)), sampled(4, 5), Segment.given([3]), sampled(6, 7)]
    rollout = Rollout(RolloutId(0), GroupId(0), RolloutStatus.RUNNING, turns, FinishReason.STOP)
    cut = _cut(rollout, newest)
    assert [len(segment) for segment in cut.segments[1:]] == expected
    assert cut.finish_reason is (FinishReason.STOP if newest == 7 else None)


def test_a_complete_stream_stays_unchanged(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path)
    append_batches(run, recipe, range(7))
    save_step(run, recipe, 5)
    reports, restored = resumed(run, recipe)
    assert reports == []
    assert restored.state == actor_after(7)


def test_preprocessed_groups_are_not_preprocessed_again(tmp_path: Path) -> None:
    """The stream of groups lost records whose batches are in the stream of batches."""
    run, recipe = a_run(tmp_path, "preprocess.num_workers=1")
    append_batches(run, recipe, range(6))
    with closing(open_groups(run, recipe)) as groups:
        for index in range(4):
            groups.append(chosen(index))
    reports, restored = resumed(run, recipe)
    assert reports == ["the stream of groups has lost records around 6; it continues there"]
    assert restored.state == actor_after(6)


def test_lost_batches_with_trimmed_groups_are_made_again(tmp_path: Path) -> None:
    """The stream of batches lost records whose groups were trimmed already."""
    run, recipe = a_run(tmp_path, "preprocess.num_workers=1")
    append_batches(run, recipe, range(6))
    save_step(run, recipe, 5)
    with closing(open_groups(run, recipe)) as groups:
        for index in range(9):
            groups.append(chosen(index))
        groups.trim(8)
    reports, restored = resumed(run, recipe)
    assert reports == ["the stream of groups has lost records around 6; it continues there"]
    assert restored.state == actor_after(6)
    with closing(open_groups(run, recipe)) as groups:
        assert groups.append(chosen(6)) == 6


@pytest.mark.parametrize(
    ("num_sent", "num_trimmed", "num_scored", "next_sent"), [(3, 0, 5, 5), (5, 5, 3, 3), (5, 3, 4, 5)]
)
def test_workers_go_on_after_lost_groups_or_scores(
    tmp_path: Path, num_sent: int, num_trimmed: int, num_scored: int, next_sent: int
) -> None:
    """The stream of groups to score, or the stream of scores, lost records; or neither did."""
    run, recipe = a_run(tmp_path, "loss.kl_coefficient=0.01", "preprocess.num_workers=2")
    with closing(open_unscored(run, recipe, 1)) as unscored, closing(open_scores(run, recipe, 1)) as scores:
        unscored.append_many([GroupToScore(GroupId(index), []) for index in range(num_sent)])
        unscored.trim(num_trimmed)
        scores.append_many([GroupScores(GroupId(index), b"", []) for index in range(num_scored)])
    prepare_to_resume(run, recipe, pytest.fail)
    with closing(open_unscored(run, recipe, 1)) as unscored, closing(open_scores(run, recipe, 1)) as scores:
        assert scores.next_offset() == num_scored
        left = unscored.read(num_scored, 10, timeout_s=0)
        assert [group.group_id for group in left] == list(range(num_scored, next_sent))
        assert unscored.append(GroupToScore(GroupId(9), [])) == next_sent


def test_a_stream_of_a_newer_midflight_stays_unchanged(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path)
    append_batches(run, recipe, range(2))
    with closing(sqlite3.connect(run.batches)) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = run.batches.read_bytes()
    with pytest.raises(RunDirectoryError, match=r"was written with schema .* by a newer midflight"):
        prepare_to_resume(run, recipe, pytest.fail)
    assert run.batches.read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path)
    model: Any = load_model(recipe.model.path)
    config = model.config
    config.intermediate_size //= 2

    def save_other(directory: Path) -> None:
        type(model)(config).save_pretrained(directory)

    save_checkpoint(run.checkpoints, TrainerState(version=3), save_other, keep=2)
    with pytest.raises(
        ModelError, match=r"step_3 is of another model: its model\.layers\.0\.mlp\.down_proj\.weight is"
    ):
        prepare_to_resume(run, recipe, pytest.fail)
