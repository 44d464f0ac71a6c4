"""The nouns: every record on the way from the dataset to the weights, and who fills which field.

Every `[T]` array is indexed by token: entry `t` describes token `t` itself. Positions that were not sampled (prompts,
text of an environment) have `loss_mask[t] == False`; their logprobs, versions and advantages are zero.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

RolloutId = NewType("RolloutId", int)
GroupId = NewType("GroupId", int)
Message = dict[str, str]  # role and content
Text = str | list[Message]


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a dataset: a question and its right answer. The chat template renders a prompt of messages."""

    problem_id: str
    prompt: Text
    answer: str = ""
    difficulty: int = 0  # on the environment's own scale; evaluations report accuracy by difficulty
    category: str = ""  # evaluations report accuracy by category, too
    source: str = ""  # name of the source, if a task or an evaluation has several
    columns: dict[str, Any] = field(default_factory=dict)  # other columns of the row; only rewards read them

    @property
    def text(self) -> str:
        """Text of the prompt; messages are joined by empty lines, without their roles."""
        return self.prompt if isinstance(self.prompt, str) else "\n\n".join(item["content"] for item in self.prompt)


@dataclass(frozen=True, slots=True)
class Grade:
    """An environment's verdict on one response; `components` are values that the environment wants logged."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    answer: str | None = None  # final answer found in the response, for majority votes


@dataclass(frozen=True, slots=True)
class GradedResponse:
    """An environment's answer to one response: a grade, the text of the next turn, or the reason for a failure."""

    rollout_id: RolloutId
    grade: Grade | None
    failure: str = ""
    text: Text | None = None


# --- generation -------------------------------------------------------------------------------------------------


# Lowest and highest temperature except 0; beyond them, float32 cannot tell the scaled logits apart.
TEMPERATURES = (0.001, 100.0)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of token sampling. `temperature == 0` is greedy; `max_tokens` counts response tokens.

    After the temperature, three filters apply in turn: the `top_k` likeliest tokens (0: all), the fewest tokens whose
    probabilities add up to `top_p`, and the tokens at least `min_p` times as likely as the likeliest one.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # the token that completes one ends the response; engines without a tokenizer ignore it


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `generated` holds the tokens that an earlier, interrupted attempt already sampled.

    The prompt of a later turn holds all earlier turns, among them `first_position` sampled tokens.

    With `score_prompt`, the completion has the prompt's log-probabilities, and `max_tokens` may be 0.

    Random numbers depend on (`seed`, `name`, position) only. An interrupted and resumed request therefore samples the
    same tokens as an uninterrupted one.
    """

    rollout_id: RolloutId
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    seed: int
    generated: GeneratedTokens | None = None
    score_prompt: bool = False
    first_position: int = 0  # position of the first token to sample, among all sampled tokens of the rollout
    prompt_version: int = 0  # newest weight version that sampled a token of the prompt
    sampled_as: RolloutId | None = None  # id of the rollout, if the request has an id of its own

    @property
    def name(self) -> RolloutId:
        """Id of the rollout, for messages and random numbers."""
        return self.rollout_id if self.sampled_as is None else self.sampled_as


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Sampled tokens, with the log-probability and the weight version of each; all `[T]`."""

    token_ids: Int32Array
    logprobs: Float32Array  # nats, under the sampling distribution
    weight_versions: Int32Array  # optimizer steps

    @classmethod
    def none(cls) -> GeneratedTokens:
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[GeneratedTokens]) -> GeneratedTokens:
        """Concatenation of the parts, in order."""
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
        """Tokens `start` to `stop`, as views of these arrays."""
        part = slice(start, stop)
        return GeneratedTokens(self.token_ids[part], self.logprobs[part], self.weight_versions[part])


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one GenerationRequest: all its generated tokens, including those of earlier attempts."""

    rollout_id: RolloutId
    generated: GeneratedTokens
    finish_reason: FinishReason
    prompt: GeneratedTokens | None = None  # scored prompt, if requested and scored by one version; its first token: NaN


# --- rollouts ---------------------------------------------------------------------------------------------------


class RolloutStatus(enum.Enum):
    RUNNING = "running"
    PARTIAL = "partial"  # not started or interrupted; its tokens are kept, and it is resumed later
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one turn, sampled or given (prompt, text of the environment); given tokens have zero logprobs."""

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

    RUNNING with a finish reason means that the turn has ended and the environment has not answered yet. Given and
    sampled segments alternate; the first segment is the prompt.
    """

    rollout_id: RolloutId
    group_id: GroupId
    status: RolloutStatus
    segments: list[Segment]
    finish_reason: FinishReason | None = None  # of the last turn
    reward: float = 0.0
    reward_components: dict[str, float] = field(default_factory=dict)
    answer: str | None = None  # as in Grade; only evaluations read it
    failure: str = ""  # the reason, when FAILED
    num_carried: int = 0  # sampled tokens that the rollout had at its last interruption

    @property
    def prompt_token_ids(self) -> Int32Array:
        return self.segments[0].tokens.token_ids

    @property
    def turns(self) -> list[GeneratedTokens]:
        """Sampled tokens of each turn."""
        return [segment.tokens for segment in self.segments if segment.sampled]

    @property
    def generated(self) -> GeneratedTokens:
        """Sampled tokens of all turns."""
        return GeneratedTokens.joined(self.turns)

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.turns))

    @property
    def is_done(self) -> bool:
        return self.status in (RolloutStatus.FINISHED, RolloutStatus.FAILED)


@dataclass(slots=True)
class RolloutGroup:
    """All attempts at one problem. The actor publishes the group when its last rollout is done; it is trained whole."""

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
    reward: float  # the target of a value function
    first_version: int  # weight version of the first generated token, which may carry no loss
    ref_logprobs: Float32Array | None = None  # as in Microbatch


# --- scores of the reference -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceToScore:
    """Tokens of one rollout; the reference scores the sampled ones. Both arrays `[T]`."""

    rollout_id: RolloutId
    token_ids: Int32Array
    sampled: BoolArray


@dataclass(frozen=True, slots=True)
class GroupToScore:
    """The rollouts of a finished group that may carry a gradient; the actor sends it to a preprocessing process."""

    group_id: GroupId
    sequences: list[SequenceToScore]


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Log-probabilities of a GroupToScore under the frozen reference.

    A group that was generated again after a kill has the same id and other tokens, hence the digest.
    """

    group_id: GroupId
    digest: bytes  # of the GroupToScore
    logprobs: list[Float32Array]  # one array per sequence, one value per sampled token


# --- training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Several trajectories laid end to end for one forward and backward pass; they never attend to each other.

    Trajectories that begin with the same prompt share one copy. The first one has the prompt among its own tokens.
    Each other sequence `s` is preceded by a shared prefix of `prefix_lengths[s]` tokens at `prefix_starts[s]`.

    Shapes: `[T]` down to `ref_logprobs`, then `[S]`; `sequence_lengths` count own tokens and sum to T.
    """

    token_ids: Int32Array
    position_ids: Int32Array  # within the trajectory, including its shared prefix
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    weight_versions: Int32Array
    advantages: Float32Array  # zero if a value function provides the advantages
    ref_logprobs: Float32Array | None  # under the frozen reference; None without a reference
    sequence_lengths: Int32Array
    prefix_starts: Int32Array
    prefix_lengths: Int32Array  # 0 for sequences without a shared prefix
    rewards: Float32Array
    first_versions: Int32Array  # as in Trajectory; kept here, because tokens without loss may be shared as a prompt

    def sequence_index(self) -> Int32Array:
        """Index of the sequence of each token that carries loss, `[M]`, in ascending order."""
        sequences = np.arange(len(self.sequence_lengths), dtype=np.int32)
        return np.repeat(sequences, self.sequence_lengths)[self.loss_mask]

    def sequence_positions(self) -> list[tuple[Int64Array, Int64Array]]:
        """Positions of the shared prefix and of the own tokens of each sequence: indices into the `[T]` arrays."""
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        return [
            (np.arange(start, start + shared, dtype=np.int64), np.arange(end - length, end, dtype=np.int64))
            for end, length, start, shared in zip(
                ends, self.sequence_lengths, self.prefix_starts, self.prefix_lengths, strict=True
            )
        ]


@dataclass(slots=True)
class ActorState:
    """State from which the actor continues after a batch: the open groups, the position in the dataset, and counts."""

    next_group_id: GroupId = GroupId(0)
    open_group_ids: list[GroupId] = field(default_factory=list)  # groups started and not yet in a batch
    num_batches: int = 0
    num_failed_groups: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # reason -> failed groups; at most a few reasons
    num_filtered_groups: int = 0  # left out by dynamic sampling, because all rewards were equal
    num_dropped_groups: int = 0  # left out by the schedule, because too many groups were waiting
    generated_tokens: int = 0
    num_updates: int = 0  # weight updates that the engines adopted
    num_aborted: int = 0  # rollouts that the schedule interrupted; each is resumed later
    # Response lengths since the last batch (tokens):
    generated_lengths: list[int] = field(default_factory=list)  # rollouts that the environment has answered
    dropped_lengths: list[int] = field(default_factory=list)  # rollouts of filtered and dropped groups


@dataclass(frozen=True, slots=True)
class ActorCheckpoint:
    """Snapshot of the actor: its state, and the rollouts of its open groups with their tokens."""

    state: ActorState
    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """Hand-over from the actor: the groups of batch `index`, and the actor's state without these groups."""

    index: int
    groups: list[RolloutGroup]
    generated_lengths: list[int]  # response tokens of rollouts whose generation ended since the last batch
    dropped_lengths: list[int]  # response tokens of rollouts filtered or dropped since the last batch
    metrics: dict[str, float]  # measured by the rollout loop since the last batch
    actor_state: ActorState


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Packed sequences of one optimizer step. Batch `index` turns weights of version `index` into the next version.

    Denominators count the whole batch, so neither packing nor the number of ranks changes the gradient. Trajectories
    without a gradient may be left out of `microbatches`; they still count.
    """

    index: int
    microbatches: list[list[Microbatch]]  # by data-parallel rank
    num_rollouts: int
    num_response_tokens: int
    num_loss_tokens: int  # response tokens that carry loss: all except those masked for their age or truncation
    group_ids: list[GroupId]
    lag_histogram: dict[int, int]  # token lag (optimizer steps) -> tokens that carry loss
    lag_by_position: Float32Array  # [10] mean token lag in each tenth of a response; NaN for a tenth without tokens
    trained_lengths: Int32Array  # [num_rollouts] response tokens
    has_gradient: BoolArray  # [num_rollouts] True if the rollout is in `microbatches`
    generated_lengths: Int32Array  # as in ChosenBatch
    dropped_lengths: Int32Array  # as in ChosenBatch
    metrics: dict[str, float]  # measured upstream; goes into the step's metrics line
    actor_state: ActorState


@dataclass(frozen=True, slots=True)
class FleetView:
    """Input of a schedule's decisions: counts, never clocks. Filtered, dropped and failed groups do not count.

    A rollout is *started* when it is admitted to an engine, and *finished* when its whole group is done and graded.
    """

    version: int  # of the weights that sample now; a version counts optimizer steps
    newest_version: int  # of the weights that the trainer published last
    num_batches: int  # batches handed to the trainer so far
    num_started: int  # rollouts, since the run began
    num_engines: int  # engines that generate now; 1 while the pool has none and waits for one
    num_waiting: int  # rollouts of open groups waiting for admission, interrupted ones first
    num_in_flight: int  # rollouts being generated, on all engines
    num_ungraded: int  # rollouts whose turn has ended and that wait for the environment's answer
    num_finished: int  # rollouts, since the run began
    most_versions_in_flight: int  # largest number of weight versions in any rollout in flight
    oldest_open_group: GroupId | None  # the earliest started group that is not finished


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A finished group that waits to be chosen; the actor lists the earliest finished group first."""

    group_id: GroupId  # ids ascend in start order
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Groups to train on next, in this order, and groups to drop for good. Either may be empty."""

    train: tuple[GroupId, ...] = ()
    drop: tuple[GroupId, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one weight tensor; the dtype is torch's name without the prefix, as in "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """The identity of weights: weights of one lineage and content have equal tensors."""

    version: int  # optimizer steps
    content: int  # the version that changed the tensors last
    lineage: str = ""  # versions and contents of different lineages are not comparable

    def has_tensors_of(self, other: WeightLabel) -> bool:
        """Return True if the tensors of both labels are equal."""
        return (self.content, self.lineage) == (other.content, other.lineage)

    def covers(self, lineage: str, version: int) -> bool:
        """Return True if these weights are of this lineage and no older than `version`."""
        return self.lineage == lineage and self.version >= version
