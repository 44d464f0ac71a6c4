"""The verbs: what each part of the house can do. A part depends on these and on `types`, not on its neighbors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    Microbatch,
    Problem,
    ReadyGroup,
    RolloutId,
    TensorSpec,
    Text,
)

if TYPE_CHECKING:
    from torch import Tensor

Record = TypeVar("Record")


class Schedule(Protocol):
    """WHEN things happen. Pure decisions over counts: no clock, no I/O, no memory of its own.

    Constructor: `schedule.options` as keyword arguments, and those of `batch_size`, `group_size` (rollouts) and `seed`
    that it has parameters for.
    """

    @property
    def colocated(self) -> bool:
        """True if generation and training take turns on one pool of compute, False if both always run."""
        ...

    @property
    def max_in_flight(self) -> int:
        """The most rollouts this schedule ever wants in flight on one engine."""
        ...

    def num_to_admit(self, fleet: FleetView) -> int:
        """How many rollouts to start now."""
        ...

    def should_abort(self, fleet: FleetView) -> bool:
        """Whether to interrupt everything in flight and keep the partial rollouts for later."""
        ...

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        """The groups of the next optimizer step, and any to drop; None if it is not time. `ready`: first done first."""
        ...

    def should_update_weights(self, fleet: FleetView) -> bool:
        """Whether the engines should adopt the newest weights before the next token."""
        ...


class Problems(Protocol):
    """The problems of a task.

    Constructor: `task.options` as keyword arguments, and the run's `seed` if it has a parameter of that name.
    """

    def problem(self, index: int) -> Problem:
        """The `index`-th training problem; a pure function of the environment's options and `index`."""
        ...

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Problems that `problem()` never returns, the same ones every time."""
        ...


class GradedTask(Problems, Protocol):
    """A task of one turn: the prompt is the problem's, and a response is graded at once."""

    def grade(self, problem: Problem, response: str) -> Grade:
        """The reward of a response. May raise: the rollout then counts as failed."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back; Hugging Face tokenizers implement it."""

    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def unk_token(self) -> str | None: ...

    @property
    def unk_token_id(self) -> int | None: ...

    @property
    def chat_template(self) -> object:
        """None if the model has none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written in the text become one token each, whatever `add_special_tokens`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        """May raise anything: a template can refuse a conversation."""
        ...

    def save_pretrained(self, save_directory: Path) -> object: ...


@runtime_checkable
class Environment(Problems, Protocol):
    """A task of one or more turns.

    Every episode is a shallow copy of the environment, so `reset` and `step` may set attributes of `self`; they must
    not change objects that other episodes share. Episodes run in other processes, and an episode may be continued in
    another one, which repeats its earlier steps: answers must depend on the problem and the responses only.

    Its constructor gets `task.options` as keyword arguments, and the run's `seed` if it takes that name or **kwargs.
    """

    def reset(self, problem: Problem) -> Text:
        """Begin an episode, and return its prompt. Also called by the rollout process, for the prompt alone."""
        ...

    def step(self, response: str) -> Text | Grade:
        """Take the response of this turn; return the text of the next turn, or the grade that ends the episode.

        May raise: the rollout then counts as failed. A rollout without room for another turn ends with reward 0 if
        the last answer is not a grade.
        """
        ...


class Grader(Protocol):
    """Runs episodes beside generation: a slow or broken environment costs its own rollout and nobody's time."""

    @property
    def num_pending(self) -> int:
        """Responses submitted whose answer was not returned yet."""
        ...

    def submit(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> None:
        """Hand over the last of the responses, with all that came before it. Never waits for an environment."""
        ...

    def results(self, timeout_s: float = 0.0) -> list[GradedResponse]:
        """The answers since the last call, in any order; waits up to `timeout_s` for the first."""
        ...


class Reference(Protocol):
    """A frozen policy that the one in training is compared with."""

    def logprobs(self, microbatch: Microbatch) -> Float32Array:
        """Log-probability of every token that carries loss, under the sampling temperature, 0 at others; `[T]`."""
        ...


class Generator(Protocol):
    """Continuous batching over token ids: requests come and go between decode steps.

    Constructor: `engine.options` as keyword arguments, and those of these that it has parameters for: `model_path`,
    `model_config` (of Hugging Face), `weights` (tensors by name), `version` (of the weights), `max_num_seqs` (requests
    that run at a time), `max_new_tokens`, and the keys of `[engine]`.
    """

    @property
    def weight_version(self) -> int:
        """Optimizer steps behind the weights that sample the next token."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Requests added and not yet completed."""
        ...

    @property
    def num_engines(self) -> int:
        """How many engines share the requests; at least 1."""
        ...

    @property
    def update_pending(self) -> bool:
        """Whether weights given to `update_weights` still wait to be swapped in; the tensors are in use until then."""
        ...

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Requests with the same prompt share its prefill.

        Raises: RequestError naming the numbers, if one does not fit; then none of them is added.
        """
        ...

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        """What a request in flight has generated so far, from its `start`-th token on; for streaming.

        Raises: KeyError if no such request is in flight.
        """
        ...

    def step(self) -> list[Completion]:
        """Sample one token for every running request; return the completions of those that ended.

        Raises: NonFiniteWeightsError if pending weights are found to have NaN or infinite values. Nothing was sampled;
        the old weights go on serving at the next step.
        """
        ...

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Stop these requests and return what they generated so far, ready to be resumed."""
        ...

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Sample with these weights from now on, or from one of the next steps (`update_pending`); nothing is aborted.

        Raises: WeightUpdateError if a name, shape or dtype does not fit, a value is not finite, the version is older
        than the one that samples a request in flight, or another update is pending; the old weights go on serving.
        """
        ...


class WeightSender(Protocol):
    """The trainer's end of the weight transport."""

    def announce(self, specs: Sequence[TensorSpec]) -> None: ...

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Make these weights, in the order announced, the newest; never waits for a receiver.

        Asks for one tensor after another, so that a trainer need not have all of them in one piece.
        """
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """An engine's end of the weight transport."""

    def newest_version(self) -> int | None:
        """The version `receive` would return now, or None before the first one. Cheap: asked at every token."""
        ...

    def receive(self) -> tuple[int, Mapping[str, Tensor]]:
        """The newest weights and their version. The tensors are the caller's until the next `receive`."""
        ...

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        """Wait for a version above `newer_than`; whether there is one."""
        ...


class WeightTransport(Protocol):
    """Both ends of the way from the trainer to the engines. The trainer and the rollout process each make one.

    Constructor: `weights.options` as keyword arguments, and those of these that it has parameters for:
    `run_directory`, `shared` (a path in the memory of this machine), `spare` (a path for what has no room there) and
    `note` (a function that tells the user a line).
    """

    def sender(self) -> WeightSender: ...

    def receiver(self) -> WeightReceiver: ...


class MetricsSink(Protocol):
    """A place for metrics, besides metrics.jsonl. One that raises gets no more lines, and the run goes on.

    Constructor: its `options` as keyword arguments, and those of these that it has parameters for: `run_directory`,
    and `version`, of the weights that training goes on with. Lines of later versions may then come again.
    """

    def write(self, line: Mapping[str, Any]) -> None:
        """The metrics of one optimizer step by name: numbers, and lists of numbers."""
        ...

    def close(self) -> None: ...


class Stream(Protocol[Record]):
    """A bounded, ordered log between two stages. Offsets count from 0 and never repeat.

    Constructor: `streams.options` as keyword arguments, and those of these that it has parameters for: `name` (of the
    stream, unlike that of any other run's), `path` (of a file that nobody else uses), `record_type` (a dataclass;
    `midflight.streams.codec.Codec` makes bytes of it) and `capacity` (records). Each process makes its own.

    A record stays until it is trimmed. The bound is on how far the reader may be behind: asking from an offset says
    that every record before it was taken. A timeout of None waits for ever.

    Raises: StreamError if a record cannot be written or read, or `from_offset` was trimmed or is past the end.
    """

    @property
    def capacity(self) -> int:
        """Number of records that the reader may be behind."""
        ...

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        """Add a record and return its offset; when full, wait up to `timeout_s` and then return None."""
        ...

    def append_many(self, records: Sequence[Record], timeout_s: float | None = None) -> list[int]:
        """Add records in order, waiting up to `timeout_s` for room; the offsets of the first so many, that found it.

        A writer that is killed meanwhile has added the first so many.
        """
        ...

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        """Records `from_offset`, `from_offset + 1`, ...; waits up to `timeout_s` for the first, then returns []."""
        ...

    def trim(self, before_offset: int) -> None:
        """Forget the records before `before_offset`."""
        ...

    def skip_to(self, offset: int) -> None:
        """Forget every record; the next one gets `offset`. For one that lost records which others have gone past."""
        ...

    def next_offset(self) -> int:
        """The offset the next appended record will get."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyOutputs:
    """What a forward pass says about every token that carries loss; each `[M]`."""

    logprobs: Tensor  # nats, under the sampling temperature
    entropy: Tensor  # of the distribution the token is from, nats
    values: Tensor | None  # expected reward before the token; None without a value head


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The gradient of one optimizer step."""

    grad_norm: float  # before clipping
    skipped: bool  # the gradient was not finite, and nothing changed


@runtime_checkable
class TrainerBackend(Protocol):
    """The five verbs of training; the RL loop knows nothing else.

    Besides, only a backend can save weights, and remember them for losses with a proximal policy.
    """

    def init(self, rank: int) -> None: ...

    def forward(self, microbatch: Microbatch) -> PolicyOutputs: ...

    def remember_proximal(self) -> None:
        """The weights of now are the proximal policy from now on, also after `save` and `load`."""
        ...

    def forward_proximal(self, microbatch: Microbatch) -> PolicyOutputs:
        """`forward` of the proximal policy, without gradient."""
        ...

    def backward(self, loss: Tensor) -> None: ...

    def optimizer_step(self, learning_rate: float) -> OptimizerStep: ...

    def publish_weights(self, version: int) -> None: ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
