"""Recipes: typed, frozen, every key documented with its unit. Imports no torch, so that `--help` is instant.

A recipe is TOML; `section.key=value` on the command line overrides it. Relative paths are relative to the recipe's
directory in a recipe, and to the working directory on the command line. A section that has a `type` starts afresh
when the command line changes its type: the recipe's other keys of that section belong to the old type.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from midflight.errors import RecipeError
from midflight.types import TEMPERATURES


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$", description="run directories are named after it")
    seed: int = Field(0, ge=0, description="problems, sampling and packing follow from it")
    directory: Path | None = Field(None, description="where the run is written; default runs/NAME-DATE-TIME")


class ModelConfig(Section):
    path: Path = Field(description="Hugging Face model directory (config.json, *.safetensors, tokenizer.json)")


class TaskConfig(Section):
    type: str = Field("chain_sums", description="a built-in environment, or package.module:Class")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    num_graders: int = Field(1, ge=1, description="processes that grade responses")
    grading_timeout_s: float = Field(
        10.0, gt=0, description="a verifier that takes longer is killed and its rollout failed, seconds"
    )


class SamplingConfig(Section):
    max_tokens: int = Field(160, ge=1, description="longest response, tokens")
    temperature: float = Field(
        1.0,
        ge=TEMPERATURES[0],
        le=TEMPERATURES[1],
        description="of the sampling distribution; the trainer applies the same",
    )


Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]


class EngineConfig(Section):
    device: Device = Field("cpu", description="cpu, cuda or cuda:N")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: all cores if colocated, else half")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="what is computed in; auto: the weights' own, but float32 on a CPU that only emulates bfloat16",
    )
    max_prompt_tokens: int = Field(64, ge=1, description="longest prompt, tokens")
    max_batched_tokens: int = Field(512, ge=16, description="of one step: decodes and pieces of prefills, tokens")
    kv_cache_mib: int | None = Field(
        None, ge=1, description="memory of the KV cache, MiB; default: all sequences in flight at their longest"
    )
    prefix_caching: bool = Field(True, description="use the keys and values of known prefixes again, within a version")
    recompute_kv: bool = Field(
        False, description="after an update, compute keys and values in flight again with the new weights"
    )
    max_update_pause_s: float = Field(
        0.02, gt=0, description="new weights are copied between steps, at most about this long each time, seconds"
    )


class PipelineConfig(Section):
    """Keep H rollouts in flight, always; adopt new weights after every optimizer step."""

    type: Literal["pipeline"] = "pipeline"
    num_in_flight: int = Field(64, ge=1, description="rollouts being generated at any time, per engine")
    max_waiting: int | None = Field(
        None,
        ge=1,
        description="finished rollouts that wait, the batch in training not counted; at least a batch, the default",
    )
    when_full: Literal["block", "drop_oldest"] = Field(
        "block", description="past max_waiting: do not refill finished slots, or drop the groups that finished first"
    )
    max_lag: int | None = Field(None, ge=0, description="hard bound on token lag, optimizer steps; default: none")


class ConventionalConfig(Section):
    """Generate for G optimizer steps, then train G times, in turns."""

    type: Literal["conventional"] = "conventional"
    steps_per_rl_step: int = Field(1, ge=1, description="G: optimizer steps per RL step")
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: all of the RL step")


class AprilConfig(Section):
    """Start more groups than a batch needs, train on the first to finish, go on with the others later."""

    type: Literal["april"] = "april"
    over_sampling: float = Field(2.0, ge=1, description="groups held at a time, in batches; 1 waits for all of them")
    max_versions: int | None = Field(
        None, ge=1, description="weight versions in one rollout: an iteration waits for those that have so many"
    )
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: all that are held")


class BoundedConfig(Section):
    """Generation runs ahead of training by a bounded number of optimizer steps."""

    type: Literal["bounded"] = "bounded"
    max_lag: int = Field(1, ge=0, description="hard bound on token lag, optimizer steps")
    updates: Literal["in_flight", "boundary"] = Field(
        "in_flight", description="adopt new weights between two tokens, or between two batches only"
    )
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: all that the bound allows")


class OneStepOffConfig(Section):
    """Generate the next batch while this one is trained on: bounded, with max_lag = 1 and updates = "boundary"."""

    type: Literal["one_step_off"] = "one_step_off"
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: a batch")


ScheduleConfig = Annotated[
    PipelineConfig | ConventionalConfig | AprilConfig | BoundedConfig | OneStepOffConfig, Field(discriminator="type")
]


class BatchConfig(Section):
    batch_size: int = Field(32, ge=1, description="rollouts per optimizer step; a multiple of group_size")
    group_size: int = Field(8, ge=1, description="rollouts per problem")
    max_tokens: int = Field(4096, ge=1, description="tokens per microbatch")
    dynamic_sampling: bool = Field(
        False, description="leave out groups whose rewards are all equal, and generate others instead (DAPO)"
    )
    max_filtered_in_a_row: int = Field(
        1024, ge=1, description="with dynamic_sampling: the run ends after so many such groups in a row"
    )
    mask_older_than: int | None = Field(
        None, ge=0, description="tokens of a greater lag carry no loss, optimizer steps; default: all tokens do"
    )


class AdvantageConfig(Section):
    type: Literal["group_mean", "group_mean_std", "none"] = Field("group_mean_std", description="the baseline")


class LossConfig(Section):
    type: Literal["reinforce"] = Field("reinforce", description="the objective")
    max_ratio: float = Field(5.0, gt=0, description="c: importance ratios are truncated here")
    denominator: Literal["tokens", "sequences"] = Field(
        "tokens", description="the batch's loss is summed over tokens and divided by its response tokens or sequences"
    )


class TrainerConfig(Section):
    device: Device = Field("cpu", description="cpu, cuda or cuda:N; may be the engine's")
    max_steps: int = Field(500, ge=1, description="optimizer steps of the run")
    max_seconds: float | None = Field(None, gt=0, description="stop earlier after this much training, seconds")
    learning_rate: float = Field(2e-4, gt=0, description="of AdamW, constant")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="decay of AdamW's two moments")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, decoupled")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this global norm")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="how many of the newest checkpoints stay")
    max_nonfinite_steps: int = Field(5, ge=1, description="stop after this many skipped steps in a row")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: all cores if colocated, else half")


class EvalConfig(Section):
    num_problems: int = Field(512, ge=0, description="held-out problems before and after the run; 0: none")
    num_in_flight: int = Field(256, ge=1, description="problems at a time")
    hard_from: int = Field(5, ge=0, description="accuracy is also reported for problems of this difficulty and above")


class ServeConfig(Section):
    """`midflight serve`: the model over HTTP."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; other than loopback needs a token")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0: any that is free")
    admin_token: pydantic.SecretStr | None = Field(
        None,
        exclude=True,  # a run directory is no place for it
        description="what weight updates, abort, pause and resume must carry; default: $MIDFLIGHT_ADMIN_TOKEN, or none",
    )
    model_name: str | None = Field(
        None, min_length=1, description="what clients call the model; default: its directory"
    )
    num_in_flight: int = Field(64, ge=1, description="sequences being generated at a time; more requests wait")
    max_samples: int = Field(128, ge=1, description="most samples (n) of one request")
    max_body_bytes: int = Field(4 << 20, ge=1, description="largest request body, bytes")


class Recipe(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    schedule: ScheduleConfig = PipelineConfig()
    batch: BatchConfig = BatchConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    serve: ServeConfig = ServeConfig()

    @pydantic.model_validator(mode="after")
    def check_batches(self) -> Recipe:
        batch = self.batch
        if batch.batch_size % batch.group_size:
            lower = batch.batch_size // batch.group_size * batch.group_size
            higher = lower + batch.group_size
            raise ValueError(
                f"batch.batch_size = {batch.batch_size} is not a multiple of batch.group_size = {batch.group_size};"
                f" {f'{lower} or {higher}' if lower else higher} would work"
            )
        longest = self.engine.max_prompt_tokens + self.sampling.max_tokens
        if batch.max_tokens < longest:
            raise ValueError(
                f"batch.max_tokens = {batch.max_tokens} cannot hold one sequence of engine.max_prompt_tokens +"
                f" sampling.max_tokens = {longest} tokens"
            )
        waiting = self.schedule.max_waiting if isinstance(self.schedule, PipelineConfig) else None
        if waiting is not None and waiting < batch.batch_size:
            raise ValueError(
                f"schedule.max_waiting = {waiting} is less than batch.batch_size = {batch.batch_size}: the batch could"
                f" never fill up; {batch.batch_size} or more would work"
            )
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Raises: RecipeError, one line: which key and what would work.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    _anchor_paths(values, path.resolve().parent)
    for override in overrides:
        _apply_override(values, override)
    try:
        return Recipe.model_validate(values)
    except pydantic.ValidationError as error:
        raise RecipeError(_one_line(error)) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML; `load_recipe` of it gives the same recipe."""
    lines: list[str] = []
    for section, values in recipe.model_dump(mode="json", exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def describe_recipe() -> list[tuple[str, str, str, str]]:
    """(key, type, default, description) of every recipe key, for `midflight config show --docs` and the README."""
    rows: list[tuple[str, str, str, str]] = []
    for name, section_field in Recipe.model_fields.items():
        for section in _section_types(section_field.annotation):
            rows += [
                (
                    f"{name}.{key}",
                    _type_name(field.annotation),
                    "required" if field.is_required() else _toml_value(field.get_default(call_default_factory=True)),
                    field.description or "",
                )
                for key, field in section.model_fields.items()
            ]
    return rows


def _section_types(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type):
        return [annotation]
    return [kind for kind in get_args(annotation) if isinstance(kind, type)]


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _toml_value(value: Any) -> str:
    """TOML of plain JSON-like values; json's strings, numbers and lists are TOML already."""
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def _anchor_paths(values: dict[str, Any], directory: Path) -> None:
    for section, key in (("model", "path"), ("run", "directory")):
        table = values.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str((directory / Path(table[key]).expanduser()).resolve())


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) < 2:
        raise RecipeError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    override_values: dict[str, Any] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        override_values = {part: override_values}
    _anchor_paths(override_values, Path.cwd())
    if parts[-1] == "type" and values.get(parts[0], {}).get("type") != value:
        values[parts[0]] = {}
    _merge(values, override_values, key)


def _merge(values: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    for name, change in changes.items():
        if isinstance(change, dict) and isinstance(values.get(name, {}), dict):
            _merge(values.setdefault(name, {}), change, key)
        elif isinstance(change, dict):
            raise RecipeError(f"override {key}: {name} is a value, not a section")
        else:
            values[name] = change


def _one_line(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    kinds = _schedule_kinds()
    location = [str(part) for part in first["loc"] if part not in kinds]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        kind = first["loc"][1] if len(first["loc"]) > 2 else ""
        owners = [other for other, section in kinds.items() if location[-1] in section.model_fields]
        if kind in kinds and owners:
            return f"{key} is a key of {' and '.join(owners)}, but schedule.type = {kind!r}"
        return f"unknown key {key}{_suggestion(location)}"
    if first["type"] == "union_tag_invalid":
        return f"{key}.type: there is no {first['ctx']['tag']!r}; known are {', '.join(kinds)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    got = "" if isinstance(first["input"], dict) or not key else f", got {first['input']!r}"
    return f"{key}: {message}{got}" if key else message


def _schedule_kinds() -> dict[str, type[Section]]:
    """The sections that `schedule.type` chooses from."""
    sections = _section_types(Recipe.model_fields["schedule"].annotation)
    return {section.model_fields["type"].default: section for section in sections}


def _suggestion(location: list[str]) -> str:
    section = location[0] if len(location) > 1 else ""
    known = [key for key, *_ in describe_recipe() if key.startswith(section)]
    names = known if section else sorted({key.split(".")[0] for key in known})
    close = difflib.get_close_matches(".".join(location), names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(dict.fromkeys(names))}"
