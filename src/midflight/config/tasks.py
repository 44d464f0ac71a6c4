"""The task: the source of its problems, the rewards of a response, and the format of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from midflight.config.section import ByType, OwnSection, Section


class RewardTerm(Section):
    """One term of the reward: a function and its weight. A string is short for `type` alone."""

    type: str = Field(min_length=1, description="name of a built-in reward, or package.module:function")
    weight: float = Field(1.0, description="factor of this term in the sum of all terms; 0: only measured")
    name: str | None = Field(None, min_length=1, description="name in the metrics; default: the name of the function")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")

    @pydantic.model_validator(mode="before")
    @classmethod
    def with_options(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class BuiltInSource(Section):
    """Problems that ship with midflight, for demonstrations and tests."""

    type: Literal["chain_sums", "running_sums"] = "chain_sums"
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")


class OwnSource(OwnSection):
    """Your own class with the members of midflight.protocols.GradedTask or Environment."""


class DatasetSource(Section):
    """Rows of a file, a directory or a dataset of the Hugging Face hub."""

    type: Literal["dataset"] = "dataset"
    path: Path | None = Field(None, description="JSONL, JSON, Parquet or CSV file, or a directory of such files")
    hub_id: str | None = Field(None, description="dataset of the Hugging Face hub, such as openai/gsm8k")
    hub_config: str | None = Field(None, description="configuration of the hub dataset; default: its only one")
    split: str = Field("train", description="split of a directory or a hub dataset")
    prompt: str = Field(
        "prompt",
        min_length=1,
        description="column with the prompt, text or a list of messages; a dot reaches into a column, as in info.text",
    )
    prompt_template: str | None = Field(
        None, description='text of the prompt with columns in braces, such as "{question} Think first."'
    )
    answer: str = Field("answer", description="column with the right answer, which the rewards get; empty: none")
    answer_pattern: str | None = Field(
        None, description="regular expression whose first group, at its last match in the column, is the answer"
    )
    difficulty: str | None = Field(None, description="column with the difficulty, an integer")
    category: str | None = Field(None, description="column with a category; evaluations report by category")
    chat: bool = Field(True, description="send text prompts as a user message, with the tokenizer's chat template")
    where: str | None = Field(
        None, description='keep only rows for which this expression of columns is true, such as "level <= 3"'
    )
    drop_long_prompts: bool = Field(
        False, description="drop rows whose prompt has more than engine.max_prompt_tokens tokens, instead of refusing"
    )
    order: Literal["shuffled", "file", "difficulty"] = Field(
        "shuffled", description="order of each epoch: shuffled anew, as in the file, or from easy to difficult"
    )
    held_out_fraction: float = Field(
        0.0, ge=0, lt=1, description="share of prompts that is held out; a hash of the prompt's text decides"
    )
    held_out_column: str | None = Field(None, description="column that is true, or 'test', in held-out rows")
    held_out_path: Path | None = Field(None, description="file or directory with held-out rows")
    held_out_split: str | None = Field(None, description="split with held-out rows")
    drop_held_out_prompts: bool = Field(
        False, description="drop training rows that have the prompt of a held-out row, instead of refusing"
    )
    rewards: tuple[RewardTerm, ...] = Field(
        (), description='rewards of a response, such as ["math", {type = "my_rewards:brevity", weight = 0.1}]'
    )

    @pydantic.model_validator(mode="after")
    def check_keys(self) -> DatasetSource:
        if (self.path is None) == (self.hub_id is None):
            raise ValueError("a dataset needs path or hub_id, and has " + ("neither" if self.path is None else "both"))
        held_out = [
            name
            for name in ("held_out_fraction", "held_out_column", "held_out_path", "held_out_split")
            if getattr(self, name)
        ]
        if len(held_out) > 1:
            raise ValueError(f"{' and '.join(held_out)} are different ways to hold rows out; one of them would work")
        if self.order == "difficulty" and self.difficulty is None:
            raise ValueError("order = 'difficulty' needs the key difficulty, which names a column")
        return self


class GymTask(Section):
    """One task of reasoning-gym. A string is short for `name` alone."""

    name: str = Field(min_length=1, description="name of the task, such as countdown")
    weight: float = Field(1.0, gt=0, description="share of the problems, relative to the other tasks")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task")

    @pydantic.model_validator(mode="before")
    @classmethod
    def with_options(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class ReasoningGymSource(Section):
    """Problems and verifiers of the library reasoning-gym."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: tuple[GymTask, ...] = Field(
        min_length=1, description='tasks, such as ["countdown", {name = "chain_sum", options = {max_terms = 3}}]'
    )
    chat: bool = Field(True, description="send prompts as a user message, with the tokenizer's chat template")
    prompt_template: str | None = Field(None, description='text of the prompt with "{question}" in it')
    answer_pattern: str | None = Field(
        None, description="regular expression whose first group, at its last match in the response, is graded"
    )
    rewards: tuple[RewardTerm, ...] = Field((), description="further rewards, added to the verifier's score")


Source = Annotated[BuiltInSource | OwnSource | DatasetSource | ReasoningGymSource, ByType(keeps=True)]


class WeightedSource(Section):
    """One of several sources of problems."""

    name: str | None = Field(None, min_length=1, description="name in the metrics; default: its position")
    weight: float = Field(1.0, gt=0, description="share of the problems, relative to the other sources")
    task: Source = Field(description="the keys of a [task] of another type, without those of every task")


class MixtureSource(Section):
    """Problems drawn from several sources; each source grades its own problems."""

    type: Literal["mixture"] = "mixture"
    sources: tuple[WeightedSource, ...] = Field(min_length=1, description="[[task.sources]]: weight, name and task")


class TaskOptions(Section):
    """Options of every task."""

    system_prompt: str | None = Field(
        None, description="system message before prompts that are messages and have no system message of their own"
    )
    chat_template: Path | None = Field(
        None, description="file with a chat template (Jinja); default: the tokenizer's template"
    )
    chat_template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking = false}"
    )
    num_graders: int = Field(1, ge=1, description="number of processes that grade responses")
    grading_timeout_s: float = Field(
        10.0, gt=0, description="timeout of one answer of the environment; a late one fails its rollout, seconds"
    )
    max_failed_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="the run ends if more than this share of the last 256 rollouts (at least 64) failed",
    )


class BuiltInTaskConfig(TaskOptions, BuiltInSource):
    """Problems that ship with midflight, for demonstrations and tests."""


class OwnTaskConfig(TaskOptions, OwnSource):
    """Your own class with the members of midflight.protocols.GradedTask or Environment."""


class DatasetTaskConfig(TaskOptions, DatasetSource):
    """Rows of a file, a directory or a dataset of the Hugging Face hub."""


class ReasoningGymTaskConfig(TaskOptions, ReasoningGymSource):
    """Problems and verifiers of the library reasoning-gym."""


class MixtureTaskConfig(TaskOptions, MixtureSource):
    """Problems drawn from several sources; each source grades its own problems."""


TaskConfig = Annotated[
    BuiltInTaskConfig | DatasetTaskConfig | ReasoningGymTaskConfig | MixtureTaskConfig | OwnTaskConfig,
    ByType(keeps=True),
]
