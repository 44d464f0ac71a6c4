"""The whole recipe, and the checks across its sections."""

from __future__ import annotations

import math
from typing import Any

import pydantic

from midflight.config import algorithms, sections
from midflight.config.evaluations import EvalConfig
from midflight.config.schedules import ConventionalConfig, PipelineConfig, ScheduleConfig, check_queue
from midflight.config.section import Section
from midflight.config.serving import ServeConfig
from midflight.config.tasks import BuiltInTaskConfig, TaskConfig

GROUP_BASELINES = ("group_mean", "group_mean_std", "leave_one_out")


class Recipe(Section):
    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig
    task: TaskConfig = BuiltInTaskConfig()
    sampling: sections.SamplingConfig = sections.SamplingConfig()
    engine: sections.EngineConfig = sections.EmbeddedEngineConfig()
    schedule: ScheduleConfig = PipelineConfig()
    batch: sections.BatchConfig = sections.BatchConfig()
    reward: algorithms.RewardConfig = algorithms.RewardConfig()
    advantage: algorithms.AdvantageConfig = algorithms.GroupAdvantageConfig()
    loss: algorithms.LossConfig = algorithms.ReinforceConfig()
    reference: algorithms.ReferenceConfig = algorithms.ReferenceConfig()
    preprocess: sections.PreprocessConfig = sections.PreprocessConfig()
    streams: sections.StreamsConfig = sections.SqliteStreamsConfig()
    weights: sections.WeightsConfig = sections.SharedMemoryWeightsConfig()
    trainer: sections.TrainerConfig = sections.SingleTrainerConfig()
    metrics: sections.MetricsConfig = sections.MetricsConfig()
    supervisor: sections.SupervisorConfig = sections.SupervisorConfig()
    eval: EvalConfig = EvalConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def max_length(self) -> int:
        """Longest prompt and response together (tokens)."""
        return self.engine.max_prompt_tokens + self.sampling.max_tokens

    @pydantic.model_validator(mode="before")
    @classmethod
    def with_default_transport(cls, values: Any) -> Any:
        """Choose the transport that reaches the engines, if the recipe names none."""
        if not isinstance(values, dict):
            return values
        weights = values.get("weights", {})
        if _type_of(values.get("engine")) == "http" and isinstance(weights, dict) and "type" not in weights:
            return values | {"weights": {"type": "process_group"} | weights}
        return values

    @pydantic.model_validator(mode="after")
    def check_weights(self) -> Recipe:
        engine, weights = self.engine.type, self.weights
        if engine == "http" and weights.type == "shared_memory":
            raise ValueError(
                "weights.type = 'shared_memory' reaches an engine in the rollout process only, but engine.type ="
                " 'http'; weights.type = 'process_group' or 'files' would work"
            )
        if not isinstance(weights, sections.ProcessGroupWeightsConfig):
            return self
        if engine != "http":
            raise ValueError(
                "weights.type = 'process_group' sends weights to servers, but engine.type ="
                f" {engine!r} generates in the rollout process; weights.type = 'shared_memory' would work"
            )
        on_cpu = [key for key in ("trainer", "engine") if getattr(self, key).device == "cpu"]
        if weights.backend == "nccl" and on_cpu:
            raise ValueError(
                f"weights.backend = 'nccl' connects CUDA devices only, but {on_cpu[0]}.device = 'cpu';"
                " weights.backend = 'tcp' would work"
            )
        return self

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
        num_ranks = self.trainer.num_ranks
        if batch.batch_size % num_ranks:
            step = math.lcm(num_ranks, batch.group_size)
            lower = batch.batch_size // step * step
            raise ValueError(
                f"batch.batch_size = {batch.batch_size} cannot be shared equally by trainer.num_ranks = {num_ranks};"
                f" {f'{lower} or {lower + step}' if lower else step} would work"
            )
        if batch.max_tokens < self.max_length:
            raise ValueError(
                f"batch.max_tokens = {batch.max_tokens} cannot hold one sequence of engine.max_prompt_tokens +"
                f" sampling.max_tokens = {self.max_length} tokens; {self.max_length} or more would work"
            )
        check_queue(self.schedule, batch.batch_size)
        return self

    @property
    def max_eval_tokens(self) -> int:
        """Largest length of a response in an evaluation (tokens)."""
        return max([self.sampling.max_tokens, *(item.max_tokens or 0 for item in self.eval.sets)])

    @property
    def max_new_tokens(self) -> int:
        """Largest length of a response that the engines of a run generate, in training or evaluation (tokens)."""
        return self.sampling.max_tokens if self.eval.interval is None else self.max_eval_tokens

    @property
    def max_engine_length(self) -> int:
        """Longest prompt and response together, in training or evaluation (tokens)."""
        return self.engine.max_prompt_tokens + self.max_new_tokens

    @pydantic.model_validator(mode="after")
    def check_evaluation(self) -> Recipe:
        every, schedule = self.eval.every, self.schedule
        if self.trainer.keep_best and every is None:
            raise ValueError(
                "trainer.keep_best needs evaluations during the run, but eval.every is not set;"
                f" eval.every = {self.trainer.checkpoint_every} would work"
            )
        steps = schedule.steps_per_rl_step if isinstance(schedule, ConventionalConfig) else 1
        if every is not None and every % steps:
            lower = every // steps * steps
            raise ValueError(
                f"eval.every = {every} is not a multiple of schedule.steps_per_rl_step = {steps}, and the engines only"
                f" get the weights after an RL step; {f'{lower} or {lower + steps}' if lower else steps} would work"
            )
        return self

    @pydantic.model_validator(mode="after")
    def check_preprocess(self) -> Recipe:
        num_workers, has_reference = self.num_preprocess_workers, self.loss.kl_coefficient is not None
        if self.preprocess.threads is not None and not num_workers:
            raise ValueError(
                "preprocess.threads is for preprocessing processes, but preprocess.num_workers = 0;"
                " preprocess.num_workers = 1 would work"
            )
        if num_workers > 1 and not has_reference:
            raise ValueError(
                f"preprocess.num_workers = {num_workers}: processes share the work of the reference model, but"
                " loss.kl_coefficient is not set; preprocess.num_workers = 0 or 1 would work"
            )
        if self.preprocess.device and (not has_reference or self.reference.url):
            raise ValueError(
                f"preprocess.device = {self.preprocess.device!r} is for a reference model in a process of the run,"
                " which this recipe has not; leave it out"
            )
        return self

    @property
    def num_preprocess_workers(self) -> int:
        """Number of preprocessing processes; 0 if the rollout process preprocesses."""
        if self.preprocess.num_workers is None:
            return int(self.loss.kl_coefficient is not None)
        return self.preprocess.num_workers

    @pydantic.model_validator(mode="after")
    def check_algorithm(self) -> Recipe:
        advantage, loss = self.advantage, self.loss
        if self.batch.group_size == 1 and advantage.type in GROUP_BASELINES:
            raise ValueError(
                f"advantage.type = {advantage.type!r} compares the rollouts of a group, but batch.group_size = 1: every"
                " advantage would be 0; a larger group, or advantage.type = 'value' or 'none' would work"
            )
        if loss.type == "ppo" and advantage.type != "value":
            raise ValueError(
                f"loss.type = 'ppo' learns a value function, but advantage.type = {advantage.type!r} has none;"
                " advantage.type = 'value', or loss.type = 'dapo' or 'grpo' would work"
            )
        if loss.kl_coefficient is None and (self.reference.path or self.reference.url):
            raise ValueError(
                "[reference] is used only with loss.kl_coefficient, which is not set; loss.kl_coefficient = 0 would"
                " measure the KL"
            )
        if self.reference.path and self.reference.url:
            raise ValueError(
                f"reference.path = {str(self.reference.path)!r} and reference.url = {self.reference.url!r} are two"
                " reference models; either one would work"
            )
        if self.reward.overlong_buffer >= self.sampling.max_tokens:
            raise ValueError(
                f"reward.overlong_buffer = {self.reward.overlong_buffer} is not less than sampling.max_tokens ="
                f" {self.sampling.max_tokens}: every response would be penalized for its length"
            )
        return self


def _type_of(section: Any) -> object:
    """`type` of a section that may still be a table of the recipe file."""
    return section.get("type") if isinstance(section, dict) else getattr(section, "type", None)
