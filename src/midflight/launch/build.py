"""Recipe -> objects: trainer, preprocessing, grader and actor settings; also the checks of a whole recipe."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from midflight.actor.actor import ActorConfig
from midflight.actor.grading_pool import GradingPool
from midflight.config import Recipe
from midflight.config.algorithms import ValueAdvantageConfig
from midflight.config.section import OwnSection
from midflight.config.sections import DeepSpeedTrainerConfig
from midflight.engine.loading import check_engine_runs
from midflight.engine.running_batch import MAX_STOP_TOKENS
from midflight.errors import MidflightError, MissingExtraError, ModelError, RecipeError
from midflight.generation.reference import HTTPReference
from midflight.launch.engines import check_engine
from midflight.launch.environments import build_all_environments, build_environment
from midflight.launch.evaluation import check_sets
from midflight.launch.importing import Joint, own_options
from midflight.launch.metrics import check_sinks
from midflight.launch.objectives import build_objective
from midflight.launch.prompts import build_prompts
from midflight.launch.schedules import build_schedule
from midflight.launch.streams import check_streams
from midflight.launch.task_check import check_task
from midflight.launch.users_modules import use_directory_of
from midflight.launch.weights import check_weights
from midflight.models.loading import check_model_directory, load_config, load_tokenizer, stop_token_ids, stored_dtype
from midflight.models.lora import LoraSettings
from midflight.models.prompts import PromptFormat
from midflight.models.stopping import split_stops
from midflight.models.tokenizer import Tokenizer
from midflight.preprocess.advantages import Advantage
from midflight.preprocess.batches import Preprocessing
from midflight.preprocess.reference import FrozenReference
from midflight.preprocess.scoring import GroupScorer
from midflight.protocols import Reference, Schedule, TrainerBackend, WeightSender
from midflight.tracing.spans import Tracer
from midflight.trainer.deepspeed import DeepSpeedTrainer, is_installed
from midflight.trainer.learning_rates import LearningRates
from midflight.trainer.policies import PolicySettings, check_policy
from midflight.trainer.process_group import DistributedGroup, ProcessGroup, SingleProcessGroup, join_process_group
from midflight.trainer.single import OptimizerSettings, SingleProcessTrainer
from midflight.types import SamplingParams
from midflight.weights.engine_control import KEY_VARIABLE

_ADVANTAGES_MODULE = "midflight.preprocess.advantages"
ADVANTAGES: Joint[Advantage] = Joint(
    "advantage.type",
    {
        **{name: f"{_ADVANTAGES_MODULE}:{name}" for name in ("group_mean", "group_mean_std", "leave_one_out")},
        "none": f"{_ADVANTAGES_MODULE}:no_baseline",
    },
)
_SINGLE_PROCESS = SingleProcessGroup()


def recipe_schedule(recipe: Recipe) -> Schedule:
    batch = recipe.batch
    return build_schedule(
        recipe.schedule, batch_size=batch.batch_size, group_size=batch.group_size, seed=recipe.run.seed
    )


def build_actor_config(recipe: Recipe, prompts: PromptFormat) -> ActorConfig:
    batch = recipe.batch
    return ActorConfig(
        batch.batch_size,
        batch.group_size,
        build_sampling(recipe, recipe.model.path, prompts),
        recipe.run.seed,
        recipe.max_length,
        batch.dynamic_sampling,
        batch.max_filtered_in_a_row,
        recipe.task.max_failed_fraction,
    )


def build_grader(recipe: Recipe) -> GradingPool:
    return GradingPool(
        functools.partial(build_all_environments, recipe), recipe.task.num_graders, recipe.task.grading_timeout_s
    )


def build_sampling(recipe: Recipe, path: Path, prompts: PromptFormat) -> SamplingParams:
    """Return the sampling parameters; `path` is the model's directory or a checkpoint, which names the stop tokens."""
    sampling = recipe.sampling
    token_ids, strings = split_stops(prompts.tokenizer, sampling.stop)
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop_token_ids=tuple(dict.fromkeys([*stop_token_ids(path, prompts), *token_ids])),
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        stop=strings,
    )


def build_preprocessing(recipe: Recipe) -> Preprocessing:
    batch, advantage = recipe.batch, recipe.advantage
    learns_values = isinstance(advantage, ValueAdvantageConfig)
    return Preprocessing(
        advantage=build_advantage(recipe),
        max_tokens=batch.max_tokens,
        max_response_tokens=recipe.sampling.max_tokens,
        normalize_advantages=not isinstance(advantage, ValueAdvantageConfig) and advantage.normalize_batch,
        mask_older_than=batch.mask_older_than,
        mask_truncated=batch.mask_truncated,
        overlong_buffer=recipe.reward.overlong_buffer,
        keep_zero_advantage=learns_values or recipe.loss.needs_every_token,
        num_ranks=recipe.trainer.num_ranks,
    )


def build_advantage(recipe: Recipe) -> Advantage | None:
    """Return the advantage function, or None if a value head provides advantages.

    Raises: RecipeError if the user's own function cannot be used.
    """
    advantage = recipe.advantage
    if isinstance(advantage, ValueAdvantageConfig):
        return None
    return ADVANTAGES.bind(advantage.type, {}, own_options(advantage))


def build_scorer(recipe: Recipe, tracer: Tracer, worker: int = 0) -> GroupScorer:
    """Return the scorer of preprocessing process `worker`. Raises: as `build_reference` does."""
    return GroupScorer(build_reference(recipe, worker), recipe.batch.max_tokens, tracer)


def build_reference(recipe: Recipe, worker: int = 0) -> Reference:
    """Return the reference model. Raises: ModelError if loading it fails, GenerationLostError if it is unreachable."""
    path, url = recipe.reference.path or recipe.model.path, recipe.reference.url
    if url:
        return HTTPReference(url, recipe.sampling.temperature, api_key=os.environ.get(KEY_VARIABLE))
    return FrozenReference(path, recipe.sampling.temperature, reference_device(recipe, worker))


def reference_device(recipe: Recipe, worker: int) -> torch.device:
    """Device of the reference model in preprocessing process `worker`."""
    device = torch.device(recipe.preprocess.device or recipe.engine.device)
    if device.type == "cuda" and device.index is None and worker:
        return torch.device("cuda", worker % max(1, torch.cuda.device_count()))
    return device


def build_trainer(recipe: Recipe, sender: WeightSender, group: ProcessGroup = _SINGLE_PROCESS) -> TrainerBackend:
    config = recipe.trainer
    optimizer = OptimizerSettings(config.adam_betas, config.weight_decay, config.max_grad_norm)
    policy = build_policy_settings(recipe)
    device = trainer_device(recipe, group.rank)
    if isinstance(group, DistributedGroup) and isinstance(config, DeepSpeedTrainerConfig):
        return DeepSpeedTrainer(
            recipe.model.path, optimizer, sender, group.num_ranks, config.zero_stage, policy, device
        )
    if isinstance(group, DistributedGroup):
        from midflight.trainer.fsdp import ShardedTrainer  # with FSDP, which takes long to import

        return ShardedTrainer(recipe.model.path, optimizer, sender, group.mesh, policy, device)
    return SingleProcessTrainer(recipe.model.path, optimizer, sender, policy, device)


@contextlib.contextmanager
def join_training(recipe: Recipe, rank: int, rendezvous: Path) -> Iterator[ProcessGroup]:
    """Join the recipe's process group as `rank`; `rendezvous` is explained at `join_process_group`."""
    if recipe.trainer.type == "single":
        yield _SINGLE_PROCESS
        return
    with join_process_group(rendezvous, rank, recipe.trainer.num_ranks, trainer_device(recipe, rank)) as group:
        yield group


def trainer_device(recipe: Recipe, rank: int) -> torch.device:
    device = torch.device(recipe.trainer.device)
    return torch.device("cuda", rank) if device.type == "cuda" and device.index is None else device


def build_policy_settings(recipe: Recipe) -> PolicySettings:
    config = recipe.trainer
    if config.checkpoint_dtype == "auto":
        checkpoint_dtype = stored_dtype(recipe.model.path)
    else:
        checkpoint_dtype = getattr(torch, config.checkpoint_dtype)
    return PolicySettings(
        temperature=recipe.sampling.temperature,
        with_values=recipe.advantage.type == "value",
        entropy_gradient=recipe.loss.entropy_coefficient > 0,
        dtype=getattr(torch, config.dtype),
        activation_checkpointing=config.activation_checkpointing,
        lora=lora_settings(recipe),
        checkpoint_dtype=checkpoint_dtype,
    )


def lora_settings(recipe: Recipe) -> LoraSettings | None:
    """Return the settings of LoRA adapters; None if all parameters are trained."""
    config = recipe.trainer
    if config.lora_rank is None:
        return None
    return LoraSettings(config.lora_rank, config.lora_alpha or 2.0 * config.lora_rank, config.lora_targets)


def build_learning_rates(recipe: Recipe) -> LearningRates:
    config = recipe.trainer
    return LearningRates(
        config.learning_rate,
        config.learning_rate_shape,
        config.warmup_steps,
        config.max_steps,
        config.final_learning_rate,
    )


def num_threads(configured: int | None, colocated: bool) -> int:
    """Number of CPU threads of generation or training: all cores if they take turns, else half."""
    if configured is not None:
        return configured
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_cores if colocated else max(1, num_cores // 2)


def check_recipe(recipe: Recipe) -> None:
    """Check the recipe before a process is started or a weight is read.

    Raises: RecipeError, ModelError; MissingExtraError if a package that the recipe needs is missing.
    """
    check_structure(recipe)
    check_device("trainer", recipe.trainer.device, recipe.trainer.num_ranks)
    if isinstance(recipe.trainer, DeepSpeedTrainerConfig) and not is_installed():
        raise MissingExtraError("deepspeed", "deepspeed")
    check_streams(recipe)
    check_evaluation(recipe)
    check_policy(recipe.model.path, build_policy_settings(recipe))
    if recipe.preprocess.device:
        check_device("preprocess", recipe.preprocess.device)
    _check_reference(recipe)


def check_structure(recipe: Recipe) -> None:
    """Check the parts of a recipe that need no files, devices or network.

    Raises: RecipeError if parts do not go together, or a part of the user's own cannot be used.
    """
    use_directory_of(recipe)
    _check_zero_stage(recipe, build_objective(recipe).proximal_every)
    build_advantage(recipe)
    recipe_schedule(recipe)
    check_engine(recipe)
    check_weights(recipe)
    check_sinks(recipe)


def _check_zero_stage(recipe: Recipe, proximal_every: int | None) -> None:
    if not isinstance(recipe.trainer, DeepSpeedTrainerConfig):
        return
    if recipe.trainer.zero_stage == 3 and proximal_every not in (None, 1):
        raise RecipeError(
            f"loss.proximal_every = {proximal_every} needs an older policy, which trainer.zero_stage = 3 does not keep;"
            " loss.proximal_every = 1, trainer.zero_stage = 2 or trainer.type = 'fsdp' would work"
        )


def check_evaluation(recipe: Recipe, *, needs_task: bool = True) -> None:
    """Check the part of a recipe that evaluation uses: the model, the engine, the task and the evaluation sets.

    `needs_task`: False if neither training nor the evaluation uses the task.
    Raises: RecipeError, ModelError.
    """
    prompts = build_prompts(recipe, check_model(recipe))
    num_stop_tokens = len(build_sampling(recipe, recipe.model.path, prompts).stop_token_ids)
    if not 1 <= num_stop_tokens <= MAX_STOP_TOKENS:
        raise ModelError(
            f"the tokenizer and generation_config.json in {recipe.model.path} name {num_stop_tokens} end-of-sequence"
            f" tokens; the engine needs at least 1 and supports up to {MAX_STOP_TOKENS}"
        )
    if needs_task:
        check_task(recipe, build_environment(recipe), prompts)
    check_sets(recipe, prompts)


def check_device(section: str, device: str, num_ranks: int = 1) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        raise RecipeError(f"{section}.device = {device!r}: this machine has no CUDA device; 'cpu' would work")
    if device != "cpu" and num_ranks > (count := torch.cuda.device_count()):
        raise RecipeError(
            f"{section}.num_ranks = {num_ranks}: every rank needs a CUDA device, and this machine has {count}"
        )


def check_model(recipe: Recipe) -> Tokenizer:
    """Check that the engine can run the model, and return the model's tokenizer.

    Raises: RecipeError, ModelError.
    """
    use_directory_of(recipe)
    check_device("engine", recipe.engine.device)
    path = recipe.model.path
    check_model_directory(path)
    check_engine(recipe)
    if not isinstance(recipe.engine, OwnSection):
        check_engine_runs(load_config(path))
    return load_tokenizer(path)


def _check_reference(recipe: Recipe) -> None:
    if recipe.loss.kl_coefficient is None:
        return
    path, url = recipe.reference.path, recipe.reference.url
    if path:
        check_model_directory(path, "reference.path")
        _check_vocabulary(recipe, f"reference.path: {path}", load_config(path).vocab_size)
    if url:
        try:
            with HTTPReference(url, recipe.sampling.temperature, api_key=os.environ.get(KEY_VARIABLE)) as reference:
                limits = reference.limits
        except MidflightError as error:
            raise RecipeError(f"reference.url: {error}") from error
        _check_vocabulary(recipe, f"reference.url: the model of {url}", limits.vocab_size)
        if limits.max_length < recipe.max_length:
            raise RecipeError(
                f"reference.url: {url} takes sequences of up to {limits.max_length} tokens, but"
                f" engine.max_prompt_tokens + sampling.max_tokens = {recipe.max_length}; start the server with larger"
                " limits or lower these"
            )


def _check_vocabulary(recipe: Recipe, reference: str, vocab_size: int) -> None:
    expected = load_config(recipe.model.path).vocab_size
    if vocab_size != expected:
        raise ModelError(
            f"{reference} has a vocabulary of {vocab_size} tokens, but model.path = {recipe.model.path} has {expected}:"
            " their probabilities cannot be compared"
        )
