"""Input of the formulas: number of GPUs, batch size, and the cost of each part of the work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midflight.errors import ScenarioError
from midflight.sim.costs import Counts, StepCost
from midflight.sim.lengths import LengthDistribution
from midflight.types import Float64Array


@dataclass(frozen=True, slots=True)
class Workload:
    """One RL job and its costs. All times share one unit, see the package."""

    num_gpus: int  # N
    batch_size: int  # B, rollouts
    lengths: LengthDistribution
    step_cost: StepCost  # of one engine
    train_time_per_token: float  # tau, on one GPU; n GPUs take 1/n
    train_time_per_step: float = 0.0  # fixed part, for any number of GPUs
    gpus_per_engine: int = 1
    transfer: float = 0.0  # from the end of an optimizer step until engines may adopt its weights
    preprocess: float = 0.0  # from a batch being complete until it can be trained on
    update_pause: float = 0.0  # engines do not decode while they adopt weights
    handover_pause: float = 0.0  # engines do not decode while a batch is assembled

    @property
    def batch_tokens(self) -> float:
        """Mean response tokens of a batch, B Lbar."""
        return self.batch_size * self.lengths.mean

    @property
    def pause(self) -> float:
        """Time per optimizer step in which engines do not decode, if they adopt weights after each step."""
        return self.update_pause + self.handover_pause

    @property
    def mean_age(self) -> float:
        """Mean number of tokens from a token to the end of its response, as a share of L: m2 / (2 Lbar L)."""
        lengths = self.lengths
        return lengths.second_moment / (2 * lengths.mean * lengths.max)

    def training_times(self, num_gpus: Counts) -> Float64Array:
        """Return the duration of an optimizer step on `num_gpus` GPUs, elementwise."""
        devices = np.asarray(num_gpus, np.float64)
        times: Float64Array = self.train_time_per_step + self.train_time_per_token * self.batch_tokens / devices
        return times

    def steady_step_times(self, num_in_flight: Counts) -> Float64Array:
        """Return t(h, c) of an engine that replaces finished sequences at once, elementwise.

        In this steady state c = h (m2 / Lbar - 1) / 2: a response is equally likely to be at any of its tokens, and
        long responses stay in flight for longer.
        """
        in_flight = np.asarray(num_in_flight, np.float64)
        held = (self.lengths.second_moment / self.lengths.mean - 1) / 2
        times: Float64Array = self.step_cost.step_times(in_flight) + self.step_cost.per_token * held * in_flight
        return times

    def check_num_engines(self, num_engines: int) -> None:
        """Raise ScenarioError unless `num_engines` is at least 1 and leaves a GPU for training."""
        if not 0 < num_engines <= self.max_engines:
            raise ScenarioError(
                f"cluster.num_engines = {num_engines}: with {self.num_gpus} GPUs and {self.gpus_per_engine} per engine,"
                f" use {'1' if self.max_engines == 1 else f'1 to {self.max_engines}'}"
            )

    @property
    def max_engines(self) -> int:
        """Largest number of engines that leaves a GPU for training. Raises: ScenarioError if there is none."""
        most = (self.num_gpus - 1) // self.gpus_per_engine
        if most < 1:
            raise ScenarioError(
                f"cluster.num_gpus = {self.num_gpus}: too few for an engine of {self.gpus_per_engine} and a trainer;"
                f" use at least {self.gpus_per_engine + 1}"
            )
        return most

    @property
    def num_colocated_engines(self) -> int:
        """Number of engines if all GPUs generate. Raises: ScenarioError if the GPUs do not divide into engines."""
        if self.num_gpus % self.gpus_per_engine:
            raise ScenarioError(
                f"cluster.num_gpus = {self.num_gpus} is not a multiple of gpus_per_engine = {self.gpus_per_engine}:"
                " some GPUs would never generate; use a multiple"
            )
        return self.num_gpus // self.gpus_per_engine
