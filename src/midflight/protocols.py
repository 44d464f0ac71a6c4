"""The verbs: one protocol per part of the system. A part depends on these and on `types`, not on its neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from midflight.types import (
    BatchChoice,
    Completion,
    FleetView,
    Float32Array,
    GeneratedTokens,
    GenerationRequest,
    Grade,
    GradedResponse,
    Int32Array,
    Microbatch,
    Problem,
    ReadyGroup,
    RolloutId,
    TensorSpec,
    Text,
    WeightLabel,
)

if TYPE_CHECKING:
    from torch import Tensor

Record = TypeVar("Record")


class Schedule(Protocol):
    """Decides WHEN things happen. Decisions are pure functions of counts: no clock, no I/O, no state.

    Constructor: `schedule.options` as keyword arguments, and any of `batch_size`, `group_size` (rollouts) and `seed`
    that it has parameters for.
    """

    @property
    def colocated(self) -> bool:
        """True if generation and training take turns on one pool of compute, False if both always run."""

    @property
    def max_in_flight(self) -> int:
        """Largest number of rollouts that this schedule ever wants in flight on one engine."""

    def num_to_admit(self, fleet: FleetView) -> int:
        """Number of rollouts to start now."""

    def should_abort(self, fleet: FleetView) -> bool:
        """Return True to interrupt all rollouts in flight; the partial rollouts are kept and resumed later."""

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        """Return the groups of the next optimizer step and any groups to drop, or None if it is too early.

        `ready` lists the earliest finished group first.
        """

    def should_update_weights(self, fleet: FleetView) -> bool:
        """Return True if the engines should adopt the newest weights before the next token."""


class Problems(Protocol):
    """The problems of a task.

    Constructor: `task.options` as keyword arguments, and the run's `seed` if it has a parameter of that name.
    """

    def problem(self, index: int) -> Problem:
        """Return the `index`-th training problem, a pure function of the environment's options and `index`."""

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Return problems that `problem()` never returns, the same ones every time."""


class GradedTask(Problems, Protocol):
    """A task of one turn: the problem has the prompt. See also GroupGradedTask in midflight.envs.one_turn."""

    def grade(self, problem: Problem, response: str) -> Grade:
        """Return the reward of a response. If this raises, the rollout fails."""


@runtime_checkable
class Environment(Problems, Protocol):
    """A task of one or more turns.

    Every episode is a shallow copy of the environment, so `reset` and `step` may set attributes of `self`. They must
    not change objects that episodes share. Episodes run in grading processes. If an episode continues in a different
    process, that process repeats the earlier steps, so answers must depend on the problem and the responses only.

    Constructor: `task.options` as keyword arguments, and the run's `seed` if it has that parameter or **kwargs.
    """

    def reset(self, problem: Problem) -> Text:
        """Begin an episode and return its prompt. The rollout process calls this, too, to get the prompt."""

    def step(self, response: str) -> Text | Grade:
        """Take the response of this turn; return the text of the next turn, or the grade that ends the episode.

        If this raises, the rollout fails. If this returns text and the rollout has no room for another turn, the
        rollout ends with reward 0.
        """


class Grader(Protocol):
    """Runs episodes beside generation. A slow or broken environment fails its own rollout and delays no other."""

    @property
    def num_pending(self) -> int:
        """Number of submitted responses whose answers have not been returned yet."""

    def submit(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> None:
        """Submit the last of the responses; the earlier ones come with it. Never waits for an environment."""

    def submit_group(self, rollout_ids: Sequence[RolloutId], problem: Problem, responses: Sequence[str]) -> None:
        """Submit one response of each rollout, to be graded together; one call of `results` returns all answers."""

    def results(self, timeout_s: float = 0.0) -> list[GradedResponse]:
        """Return the answers since the last call, in any order; wait up to `timeout_s` for the first one."""


class Reference(Protocol):
    """A frozen policy that the policy in training is compared with."""

    def logprobs(self, microbatch: Microbatch) -> Float32Array:
        """Log-probability of every token that carries loss, under the sampling temperature; 0 elsewhere, `[T]`."""


class StopRule(Protocol):
    """Tells the token that completes a stop string."""

    def may_end(self, token_id: int) -> bool:
        """Return False if this token never completes a stop string. Must be cheap: asked for every sampled token."""

    def ends(self, token_ids: Int32Array) -> bool:
        """Return True if the last of these tokens of a response completes a stop string."""


NO_VERSION = -1  # `weight_version` of a generator that has no weights of the run yet


class Generator(Protocol):
    """Continuous batching over token ids: requests come and go between decode steps.

    No method waits for weights. `adopt` says which version to sample with; the tensors come on another way.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample the next token (optimizer steps); with several engines, the oldest one.

        A field: reading it makes no request.
        """

    @property
    def num_in_flight(self) -> int:
        """Number of requests added and not yet completed."""

    @property
    def num_engines(self) -> int:
        """Number of engines that share the requests; at least 1."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests to the running batch; requests with the same prompt share one prefill.

        Raises: RequestError naming the numbers, if a request does not fit; then no request is added.
        """

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        """Tokens that a request in flight has generated so far, from its `start`-th token on; for streaming.

        Raises: KeyError if no such request is in flight.
        """

    def step(self) -> list[Completion]:
        """Adopt new weights if they are due, then sample one token for every running request.

        Returns the completions of the requests that ended. Must be called until `weight_version` has reached the
        version asked for, also with nothing in flight.
        Raises: WeightUpdateError if new weights cannot be used, NonFiniteWeightsError if they have NaN or infinite
        values. No token is sampled then, and the old weights keep serving from the next step on.
        """

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Stop these requests and return their tokens so far, from which they can be resumed."""

    def adopt(self, version: int) -> None:
        """Sample with this version, or a newer one, as soon as its tensors are here. Aborts no request.

        Returns at once; `weight_version` tells when the version is in use. No effect if the version is not newer.
        """


class LocalEngine(Generator, Protocol):
    """A Generator whose weights are in this process.

    Constructor: `engine.options` as keyword arguments, and any of these that it has parameters for: `model_path`,
    `model_config` (of Hugging Face), `weights` (tensors by name, valid during the call), `version` (of the weights),
    `max_num_seqs` (requests that run at a time), `max_new_tokens`, `stop_rules` (returns the StopRule of
    `SamplingParams.stop`), and the keys of `[engine]`.
    """

    def stage(self, incoming: IncomingWeights) -> None:
        """Copy new weights to where a later step can adopt them; return when they are complete.

        Called by one other thread at a time, while `step` goes on with the old weights. Replaces weights that were
        staged before and not adopted.
        Raises: WeightUpdateError if a name, shape or dtype does not fit, or a value is not finite; an error of
        `incoming.tensors`. The old weights keep serving.
        """


@dataclass(frozen=True, slots=True)
class IncomingWeights:
    """Weights as a transport hands them to an engine. The fields of WeightLabel, and the tensors."""

    version: int  # optimizer steps
    content: int  # the version that changed the tensors last, at most `version`: a skipped step changes nothing
    # Every tensor, valid until the next one is taken. Raises WeightsReplacedError if the sender has overwritten one
    # meanwhile, and WeightUpdateError if the rest does not arrive.
    tensors: Iterable[tuple[str, Tensor]]
    lineage: str = ""  # versions and contents of different lineages are not comparable
    # Raises WeightsReplacedError if the sender has overwritten a tensor by now; for tensors in use after the last one.
    check: Callable[[], object] = lambda: None

    @property
    def label(self) -> WeightLabel:
        return WeightLabel(self.version, self.content, self.lineage)


class WeightSender(Protocol):
    """The trainer's end of the weight transport."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of tensors that have left the trainer so far."""

    def announce(self, specs: Sequence[TensorSpec]) -> None: ...

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Publish these weights, in the order announced, as the newest.

        Takes one tensor at a time, so that a sharded trainer need not gather the full state at once. Takes every
        tensor even if no engine wants it, because gathering is a collective operation.
        """

    def relabel(self, version: int) -> None:
        """Publish this version with the weights that were sent last: its optimizer step changed nothing."""

    def wants_weights(self) -> bool:
        """Return True if an engine lacks the newest version and the sender kept no copy: `send` it once more."""

    def close(self) -> None: ...


class PublishedVersions(Protocol):
    """The versions that the trainer has published, for the process that decides when they are adopted."""

    def newest_version(self) -> int | None:
        """The newest published version, or None before the first. Must be cheap: read at every token."""

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        """Wait for a version above `newer_than`; return True if there is one."""

    def close(self) -> None: ...


class WeightReceiver(PublishedVersions, Protocol):
    """The end of the weight transport in the process of an engine, if engines take the weights themselves."""

    def receive(self) -> IncomingWeights:
        """Return the newest weights. Raises: WeightUpdateError if there are none or they cannot be read."""


class WeightTransport(Protocol):
    """All ends of the weight transport. Every process makes its own object.

    Constructor: `weights.options` as keyword arguments, and any of these that it has parameters for:
    `run_directory`, `shared` (a path in the shared memory of this machine), `spare` (a path on disk for data that does
    not fit there), `engines` (returns the registered servers of the run by name, each with its `url`), `lineage` (text
    that is new at every start of the run; weights of another lineage are not comparable), `device` (of the trainer)
    and `note` (a function that shows the user one line).
    """

    def sender(self) -> WeightSender: ...

    def versions(self) -> PublishedVersions:
        """Return the end of the rollout process."""

    def receiver(self) -> WeightReceiver | None:
        """Return an engine's end; None if the trainer sends weights to servers over their HTTP routes instead."""


class MetricsSink(Protocol):
    """A destination for metrics besides metrics.jsonl. A sink that raises gets no more lines, and the run continues.

    Constructor: its `options` as keyword arguments, and any of these that it has parameters for: `run_directory`, and
    `version` (of the weights that training starts or resumes from). A resumed run may repeat lines of later versions.
    """

    def write(self, line: Mapping[str, Any]) -> None:
        """Write the metrics of one optimizer step by name: numbers, and lists of numbers."""

    def close(self) -> None: ...


class Stream(Protocol[Record]):
    """A bounded, ordered log between two stages. Offsets count from 0 and never repeat.

    Constructor: `streams.options` as keyword arguments, and any of these that it has parameters for: `name` (of the
    stream, unique among all runs), `path` (of a file for this stream only), `record_type` (a dataclass, which
    `midflight.streams.codec.Codec` turns into bytes) and `capacity` (records). Each process makes its own object.

    A record stays until it is trimmed. The bound limits how far the reader may be behind: a read from an offset
    acknowledges every record before this offset. A timeout of None waits for ever.

    Raises: StreamError if a record cannot be written or read, or `from_offset` was trimmed or is past the end.
    """

    @property
    def capacity(self) -> int:
        """Largest number of records that the reader may be behind."""

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        """Append a record and return its offset. If the stream stays full for `timeout_s`, return None instead."""

    def append_many(self, records: Sequence[Record], timeout_s: float | None = None) -> list[int]:
        """Append records in order, waiting up to `timeout_s` for room; return the offsets of the appended ones.

        The appended records are always a prefix of `records`, also if the writer is killed during the call.
        """

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        """Return records from `from_offset` on; wait up to `timeout_s` for the first one, then return []."""

    def trim(self, before_offset: int) -> None:
        """Delete the records before `before_offset`."""

    def skip_to(self, offset: int) -> None:
        """Delete every record; the next one gets `offset`. Used after a loss of records that were already consumed."""

    def next_offset(self) -> int:
        """Offset of the next appended record."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyOutputs:
    """Results of a forward pass for every token that carries loss; each `[M]`."""

    logprobs: Tensor  # nats, under the sampling temperature
    entropy: Tensor  # of the distribution of the token, nats
    values: Tensor | None  # expected reward before the token; None without a value head


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Outcome of one optimizer step."""

    grad_norm: float  # before clipping
    skipped: bool  # True if the gradient was not finite; the weights are unchanged then
    changed: bool = True  # False if no weight changed: skipped, no gradient, or a learning rate of 0


@runtime_checkable
class TrainerBackend(Protocol):
    """The five verbs of training: init, forward, backward, optimizer step, publish weights.

    A backend also saves and loads its state, and remembers the proximal policy for losses that need one.
    """

    def init(self, rank: int) -> None: ...

    def forward(self, microbatch: Microbatch) -> PolicyOutputs: ...

    def remember_proximal(self) -> None:
        """Make the current weights the proximal policy; `save` and `load` keep it."""

    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        """Run `forward` with the proximal policy, without gradients."""

    def backward(self, loss: Tensor) -> None: ...

    def optimizer_step(self, learning_rate: float) -> OptimizerStep: ...

    def publish_weights(self, version: int, changed: bool = True) -> None:
        """Send the weights as `version`; if they have not `changed` since the last call, send only the number."""

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
