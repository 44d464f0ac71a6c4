"""Training loop around a backend without a model: skipped steps, the stop after too many, checkpoints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from midflight.errors import CheckpointError, NonFiniteLossError
from midflight.losses.objective import Objective
from midflight.losses.reinforce import reinforce
from midflight.metrics.jsonl import JsonlWriter, read_metrics
from midflight.protocols import OptimizerStep, PolicyOutputs
from midflight.streams.codec import Codec
from midflight.streams.memory import MemoryStream
from midflight.tracing.spans import Tracer
from midflight.trainer.checkpoints import load_state, newest_checkpoint, save_checkpoint
from midflight.trainer.loop import LoopSettings, TrainLoop
from midflight.trainer.state import TrainerState
from midflight.trainer.step import TrainStep
from midflight.types import ActorState, GroupId, Microbatch, TrainingBatch
from midflight.weights.null_sender import NullSender
from narrowing import present


class ScalarBackend:
    """Backend whose policy is one number; its gradient is not finite if an advantage is not finite."""

    def __init__(self) -> None:
        self.weight = torch.zeros((), requires_grad=True)
        self.published: list[int] = []
        self.unchanged: list[int] = []  # versions published without new weights

    def init(self, rank: int) -> None: ...

    def forward(self, microbatch: Microbatch) -> PolicyOutputs:
        count = int(microbatch.loss_mask.sum())
        return PolicyOutputs(self.weight.expand(count) - 1.0, torch.zeros(count), None)

    def remember_proximal(self) -> None: ...

    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def optimizer_step(self, learning_rate: float) -> OptimizerStep:
        gradient, self.weight.grad = present(self.weight.grad), None
        finite = bool(gradient.isfinite())
        with torch.no_grad():
            self.weight -= learning_rate * gradient if finite else 0.0
        return OptimizerStep(float(gradient), skipped=not finite, changed=finite and learning_rate > 0)

    def publish_weights(self, version: int, changed: bool = True) -> None:
        self.published.append(version)
        self.unchanged += [] if changed else [version]

    def save(self, directory: Path) -> None:
        (directory / "weight").write_text(str(float(self.weight.detach())))

    def load(self, directory: Path) -> None: ...


def batch(index: int, advantage: float) -> TrainingBatch:
    ones = np.ones(3, np.float32)
    microbatch = Microbatch(
        token_ids=np.arange(3, dtype=np.int32),
        position_ids=np.arange(3, dtype=np.int32),
        sequence_lengths=np.array([3], np.int32),
        prefix_starts=np.zeros(1, np.int32),
        prefix_lengths=np.zeros(1, np.int32),
        loss_mask=np.array([False, True, True]),
        behavior_logprobs=-ones,
        weight_versions=np.full(3, index, np.int32),
        advantages=ones * np.float32(advantage),
        ref_logprobs=None,
        rewards=ones[:1],
        first_versions=np.array([index], np.int32),
    )
    return TrainingBatch(
        index=index,
        microbatches=[[microbatch]],
        num_rollouts=1,
        num_response_tokens=2,
        num_loss_tokens=2,
        group_ids=[GroupId(index)],
        lag_histogram={0: 2},
        lag_by_position=np.zeros(10, np.float32),
        trained_lengths=np.array([2], np.int32),
        has_gradient=np.array([True]),
        generated_lengths=np.array([2, 7], np.int32),
        dropped_lengths=np.zeros(0, np.int32),
        metrics={
            "reward/mean": 1.0,
            "versions_per_rollout/max": 1.0,
            "time/rollout_s": 0.5,
            "carried_token_fraction": 0.5,
        },
        actor_state=ActorState(),
    )


@contextmanager
def loop_over(
    tmp_path: Path,
    advantages: list[float],
    learning_rate: Callable[[int], float] = lambda step: 1.0,
    sender: NullSender | None = None,
    **settings: object,
) -> Iterator[tuple[TrainLoop, ScalarBackend]]:
    stream: MemoryStream[TrainingBatch] = MemoryStream(capacity=100)
    for index, advantage in enumerate(advantages):
        stream.append(batch(index, advantage))
    backend = ScalarBackend()
    defaults = LoopSettings(
        max_steps=len(advantages),
        checkpoint_every=1000,
        keep_checkpoints=2,
        max_nonfinite_steps=5,
        checkpoints=tmp_path / "checkpoints",
        rejected_batches=tmp_path / "rejected",
    )
    chosen = replace(defaults, **settings)  # type: ignore[arg-type]
    step = TrainStep(backend, Objective(reinforce), learning_rate)
    with JsonlWriter(tmp_path / "metrics.jsonl") as metrics:
        yield TrainLoop(chosen, step, stream, TrainerState(), Tracer(None, "trainer"), metrics, sender), backend


# The ratio of the first step is 1. The step moves the policy by 1, so the ratio of the second step is e.
def test_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    with loop_over(tmp_path, [1.0, float("nan"), 1.0]) as (loop, backend):
        loop.run(lambda: False)
    assert loop.state.version == 3
    assert float(backend.weight.detach()) == pytest.approx(1 + math.e)
    assert (backend.published, backend.unchanged) == ([1, 2, 3], [2])
    assert [line["skipped"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.0, 1.0, 0.0]


def test_five_skipped_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    nan = float("nan")
    advantages = [1.0, nan, nan, nan, nan, 1.0, nan, nan, nan, nan, nan, 1.0]
    with loop_over(tmp_path, advantages) as (loop, _), pytest.raises(NonFiniteLossError, match="5 steps") as raised:
        loop.run(lambda: False)
    assert loop.state.version == 11
    saved = Codec(TrainingBatch).decode((tmp_path / "rejected" / "batch_10.msgpack").read_bytes())
    assert "batch_10.msgpack" in str(raised.value)
    assert np.isnan(saved.microbatches[0][0].advantages).all()
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert load_state(newest).version == 11
    assert float((newest / "weight").read_text()) == pytest.approx(1 + math.e)


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    with loop_over(tmp_path, [1.0] * 7, checkpoint_every=2) as (loop, _):
        loop.run(lambda: False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_6", "step_7"]


def test_stop_request_writes_a_checkpoint(tmp_path: Path) -> None:
    with loop_over(tmp_path, [1.0] * 7) as (loop, backend):
        loop.run(lambda: len(backend.published) == 3)
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_3"


def test_failed_checkpoint_keeps_the_older_one_and_leaves_no_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, TrainerState(version=3), lambda path: None, keep=1)

    def disk_full(path: Path) -> None:
        (path / "half").write_text("written")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step_4 could not be written .*No space left.*step_3 is kept"):
        save_checkpoint(tmp_path, TrainerState(version=4), disk_full, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_damaged_checkpoint_state_is_reported(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, TrainerState(version=3), lambda path: None, keep=1)
    (checkpoint / "trainer_state.json").write_text('{"version": 3')
    with pytest.raises(CheckpointError, match=r"step_3/trainer_state\.json cannot be read"):
        load_state(checkpoint)


def test_each_step_uses_its_own_learning_rate(tmp_path: Path) -> None:
    """The ratios are 1 and e^0.5, because the first step moves the policy by the first rate."""
    with loop_over(tmp_path, [1.0, 1.0], learning_rate=lambda step: [0.5, 0.25][step]) as (loop, backend):
        loop.run(lambda: False)
    assert float(backend.weight.detach()) == pytest.approx(0.5 + 0.25 * math.exp(0.5))
    assert [line["learning_rate"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.25]


class AskingSender(NullSender):
    """Asks for weights as a script says."""

    def __init__(self, wants: Iterable[bool]) -> None:
        self._wants = iter(wants)

    def wants_weights(self) -> bool:
        return next(self._wants)


def test_weights_that_an_engine_lacks_are_published_again_before_the_next_step(tmp_path: Path) -> None:
    with loop_over(tmp_path, [1.0] * 3, sender=AskingSender([False, True, False])) as (loop, backend):
        loop.run(lambda: False)
    assert backend.published == [1, 1, 2, 3]


def test_weights_are_published_again_while_no_batch_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.trainer.loop.WAIT_SLICE_S", 0.0)
    sender = AskingSender([True, True, False, True])
    with loop_over(tmp_path, [1.0], max_steps=2, sender=sender) as (loop, backend):
        loop.run(lambda: len(backend.published) == 4)
    assert backend.published == [0, 1, 1, 1]


def test_engine_that_keeps_asking_does_not_stop_the_training(tmp_path: Path) -> None:
    with loop_over(tmp_path, [1.0] * 3, sender=AskingSender(itertools.repeat(True))) as (loop, backend):
        loop.run(lambda: False)
    assert backend.published == [0, 1, 1, 2, 2, 3]
