"""The nouns: what travels from the dataset to the weights, and who fills which field.

Every `[T]` array is indexed by token: entry `t` is about token `t` itself. Positions that were not sampled
(prompts, text an environment added) carry `loss_mask[t] == False`; logprobs, versions and advantages are zero there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

RolloutId = NewType("RolloutId", int)
GroupId = NewType("GroupId", int)


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a dataset: what is asked and what would be right."""

    problem_id: str
    prompt: str
    answer: str
    difficulty: int = 0  # on the environment's own scale; evaluations report accuracy by it


@dataclass(frozen=True, slots=True)
class Grade:
    """What an environment thinks of one response; `components` add up to whatever the environment likes to log."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)


Message = dict[str, str]  # of a conversation: role and content
Text = str | list[Message]


@dataclass(frozen=True, slots=True)
class GradedResponse:
    """An environment's answer to one response: a grade, or the text of the next turn, or why there is neither."""

    rollout_id: RolloutId
    grade: Grade | None
    failure: str = ""
    text: Text | None = None


# --- generation -------------------------------------------------------------------------------------------------


# The lowest and highest temperature but 0: outside, logits divided by it leave what a float32 can tell apart.
TEMPERATURES = (0.001, 100.0)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature == 0` is greedy; `max_tokens` counts response tokens.

    After the temperature: the `top_k` likeliest tokens (0: all), then the fewest of them whose probability adds up to
    `top_p`, then those at least `min_p` times as likely as the likeliest.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `generated` is what an earlier, interrupted attempt already sampled.

    The prompt of a later turn is everything before it, with `first_position` sampled tokens.

    `score_prompt`: the completion says how likely the prompt's tokens were; then `max_tokens` may be 0.

    The random numbers depend on (`seed`, `rollout_id`, position) only, so an interrupted request goes on as if
    nothing had happened.
    """

    rollout_id: RolloutId
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    seed: int
    generated: GeneratedTokens | None = None
    score_prompt: bool = False
    first_position: int = 0  # of the first token to sample, among all sampled tokens of the rollout
    prompt_version: int = 0  # newest weights that sampled a token of the prompt


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Sampled tokens with the log-probability and the weight version each was sampled with; all `[T]`."""

    token_ids: Int32Array
    logprobs: Float32Array  # nats, under the sampling distribution
    weight_versions: Int32Array  # optimizer steps

    @classmethod
    def none(cls) -> GeneratedTokens:
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[GeneratedTokens]) -> GeneratedTokens:
        """All tokens of the parts, in order."""
        if len(parts) == 1:
            return parts[0]
        parts = [cls.none(), *parts]
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.weight_versions for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, start: int, stop: int | None = None) -> GeneratedTokens:
        """Tokens `start` to `stop`, as views."""
        part = slice(start, stop)
        return GeneratedTokens(self.token_ids[part], self.logprobs[part], self.weight_versions[part])


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one GenerationRequest: all its generated tokens, resumed ones included."""

    rollout_id: RolloutId
    generated: GeneratedTokens
    finish_reason: FinishReason
    # The prompt's tokens if `score_prompt` was asked for and they all were scored, by one version of the weights. NaN
    # for the first, which nothing comes before.
    prompt: GeneratedTokens | None = None


# --- rollouts ---------------------------------------------------------------------------------------------------


class RolloutStatus(enum.Enum):
    RUNNING = "running"
    PARTIAL = "partial"  # interrupted; its tokens are kept and it will go on
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one turn that were sampled, or given (prompt, text of the environment): then logprobs are zero."""

    tokens: GeneratedTokens
    sampled: bool = True

    @classmethod
    def given(cls, token_ids: Sequence[int] | Int32Array) -> Segment:
        ids = np.asarray(token_ids, np.int32)
        return cls(GeneratedTokens(ids, np.zeros(len(ids), np.float32), np.zeros_like(ids)), sampled=False)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Rollout:
    """One attempt at a problem. The actor creates it, the engine fills the tokens, the environment the reward.

    RUNNING with a finish reason means that the turn has ended, and the environment has not answered. Given and sampled
    segments alternate; the prompt is the first.
    """

    rollout_id: RolloutId
    group_id: GroupId
    status: RolloutStatus
    segments: list[Segment]
    finish_reason: FinishReason | None = None  # of the last turn
    reward: float = 0.0
    reward_components: dict[str, float] = field(default_factory=dict)
    failure: str = ""  # why, when FAILED
    num_carried: int = 0  # sampled tokens it had when it was last interrupted

    @property
    def prompt_token_ids(self) -> Int32Array:
        return self.segments[0].tokens.token_ids

    @property
    def turns(self) -> list[GeneratedTokens]:
        """The sampled tokens of each turn."""
        return [segment.tokens for segment in self.segments if segment.sampled]

    @property
    def generated(self) -> GeneratedTokens:
        """The sampled tokens of all turns."""
        return GeneratedTokens.joined(self.turns)

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.turns))

    @property
    def is_done(self) -> bool:
        return self.status in (RolloutStatus.FINISHED, RolloutStatus.FAILED)


@dataclass(slots=True)
class RolloutGroup:
    """All attempts at one problem. Published by the actor when the last one is done, and trained whole."""

    group_id: GroupId
    problem: Problem
    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The flat token view of one rollout that the trainer learns from; all arrays `[T]`."""

    rollout_id: RolloutId
    token_ids: Int32Array
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    weight_versions: Int32Array
    advantages: Float32Array
    reward: float  # what a value function learns to predict
    first_version: int  # of the weights that sampled the first generated token, which may carry no loss


# --- training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Several trajectories laid end to end, for one forward and backward; they never attend to each other.

    Trajectories that begin with the same prompt share one copy of it: the first has the prompt as part of its own
    tokens, the others have `prefix_lengths[s]` tokens before their own, which stand at `prefix_starts[s]`.

    Shapes: `[T]` down to `ref_logprobs`, then `[S]`; `sequence_lengths` count own tokens and sum to T.
    """

    token_ids: Int32Array
    position_ids: Int32Array  # within the trajectory, its shared prefix included
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    weight_versions: Int32Array
    advantages: Float32Array  # zero if they are to come from a value function
    ref_logprobs: Float32Array | None  # under the frozen reference; None if there is none
    sequence_lengths: Int32Array
    prefix_starts: Int32Array
    prefix_lengths: Int32Array  # 0 where nothing is shared
    rewards: Float32Array
    first_versions: Int32Array  # as in Trajectory: tokens without loss may look like a prompt, and be shared as one

    def sequence_index(self) -> Int32Array:
        """Which sequence each token that carries loss belongs to, `[M]`; they stand in order."""
        sequences = np.arange(len(self.sequence_lengths), dtype=np.int32)
        return np.repeat(sequences, self.sequence_lengths)[self.loss_mask]

    def sequence_positions(self) -> list[tuple[Int64Array, Int64Array]]:
        """Where the shared prefix and the own tokens of each sequence stand: indices into the `[T]` arrays."""
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        return [
            (np.arange(start, start + shared, dtype=np.int64), np.arange(end - length, end, dtype=np.int64))
            for end, length, start, shared in zip(
                ends, self.sequence_lengths, self.prefix_starts, self.prefix_lengths, strict=True
            )
        ]


@dataclass(slots=True)
class ActorState:
    """What the actor needs to go on after this batch: which groups are open, where the dataset stands."""

    next_group_id: GroupId = GroupId(0)
    open_group_ids: list[GroupId] = field(default_factory=list)  # started and not in any batch yet
    num_batches: int = 0
    num_failed_groups: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # why -> failed groups; at most a few different reasons
    num_filtered_groups: int = 0  # all rewards were equal, and dynamic sampling is on
    num_dropped_groups: int = 0  # by the schedule, because too many were waiting
    generated_tokens: int = 0
    num_updates: int = 0  # new weights adopted by the engine
    num_aborted: int = 0  # rollouts the schedule interrupted; each goes on later
    # Response lengths since the last batch, in tokens:
    generated_lengths: list[int] = field(default_factory=list)  # of rollouts that were generated and answered
    dropped_lengths: list[int] = field(default_factory=list)  # of those in filtered and dropped groups


@dataclass(frozen=True, slots=True)
class ActorCheckpoint:
    """The actor as it was: its state, and the rollouts of its open groups with the tokens they had."""

    state: ActorState
    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """What the actor hands over: the groups of batch `index`, and the actor as it was without them."""

    index: int
    groups: list[RolloutGroup]
    generated_lengths: list[int]  # response tokens of the rollouts whose generation ended since the last batch
    dropped_lengths: list[int]  # of those that were filtered or dropped since then
    metrics: dict[str, float]  # measured by the rollout loop since then
    actor_state: ActorState


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The sequences of one optimizer step, packed. Batch `index` is trained on by weights of version `index`.

    Denominators count the whole batch, so that neither packing nor ranks change the gradient. Trajectories that
    cannot contribute a gradient may be left out of `microbatches`; they still count.
    """

    index: int
    microbatches: list[list[Microbatch]]  # by data-parallel rank
    num_rollouts: int
    num_response_tokens: int
    num_loss_tokens: int  # response tokens that carry loss: all but those masked for their age or truncation
    group_ids: list[GroupId]
    lag_histogram: dict[int, int]  # token_lag (in optimizer steps) -> tokens that carry loss
    lag_by_position: Float32Array  # [10] mean token_lag in each tenth of a response; NaN where there is no token
    trained_lengths: Int32Array  # [num_rollouts] response tokens
    has_gradient: BoolArray  # [num_rollouts] whether it is in `microbatches`
    generated_lengths: Int32Array  # of the rollouts whose generation ended since the last batch
    dropped_lengths: Int32Array  # of those that were filtered or dropped since then
    metrics: dict[str, float]  # measured upstream; goes into the step's metrics line
    actor_state: ActorState


# --- scheduling -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FleetView:
    """What a schedule may know: counts, never clocks. Rollouts of dropped and failed groups are not in the counts.

    A rollout is *started* when it is admitted to an engine, *finished* when its whole group is done and graded.
    """

    version: int  # optimizer steps behind the weights that sample now
    newest_version: int  # optimizer steps the trainer has finished and published
    num_batches: int  # batches handed to the trainer so far
    num_started: int  # rollouts, since the run began
    num_engines: int  # that generate now; 1 while one is waited for
    num_waiting: int  # rollouts of open groups that are to be admitted, interrupted ones first
    num_in_flight: int  # rollouts started whose own generation is not done, on all engines
    num_ungraded: int  # rollouts whose turn has ended, and that wait for the environment's answer
    num_finished: int  # rollouts, since the run began
    most_versions_in_flight: int  # weight versions in the rollout in flight that has tokens of the most
    oldest_open_group: GroupId | None  # the earliest started group that is not finished


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A finished group waiting to be chosen; the actor lists them earliest finished first."""

    group_id: GroupId  # ids count up in start order
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The groups to train on next, in this order, and the groups to drop for good. Either may be empty."""

    train: tuple[GroupId, ...] = ()
    drop: tuple[GroupId, ...] = ()


# --- weights ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (torch's name without the prefix: "float32") of one weight tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
