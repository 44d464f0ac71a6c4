"""What the formulas are about: so many GPUs, batches of so many responses, and what each part of the work takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midflight.errors import ScenarioError
from midflight.sim.costs import Counts, StepCost
from midflight.sim.lengths import LengthDistribution
from midflight.types import Float64Array


@dataclass(frozen=True, slots=True)
class Workload:
    """Times are in one unit, see the package."""

    num_gpus: int  # N
    batch_size: int  # B, rollouts
    lengths: LengthDistribution
    step_cost: StepCost  # of one engine
    train_time_per_token: float  # tau, of one GPU; n of them take 1/n
    train_time_per_step: float = 0.0  # besides, however many GPUs
    gpus_per_engine: int = 1
    transfer: float = 0.0  # from the end of an optimizer step until engines may adopt its weights
    preprocess: float = 0.0  # from a batch being complete until it can be trained on
    update_pause: float = 0.0  # engines stand still while they adopt weights
    handover_pause: float = 0.0  # engines stand still while a batch is made up

    @property
    def batch_tokens(self) -> float:
        """B Lbar: response tokens of an average batch."""
        return self.batch_size * self.lengths.mean

    @property
    def pause(self) -> float:
        """How long engines stand still for each optimizer step, when weights are adopted after each."""
        return self.update_pause + self.handover_pause

    @property
    def mean_age(self) -> float:
        """Share of the longest response that is generated after an average token, m2 / (2 Lbar L)."""
        lengths = self.lengths
        return lengths.second_moment / (2 * lengths.mean * lengths.max)

    def training_times(self, num_gpus: Counts) -> Float64Array:
        """Of an optimizer step on so many GPUs, elementwise."""
        devices = np.asarray(num_gpus, np.float64)
        times: Float64Array = self.train_time_per_step + self.train_time_per_token * self.batch_tokens / devices
        return times

    def steady_step_times(self, num_in_flight: Counts) -> Float64Array:
        """t(h, c) of an engine whose finished sequences are replaced at once, elementwise.

        Then c = h (m2 / Lbar - 1) / 2: a token of a response of l is as likely any of its l, and long responses are
        in flight for longer.
        """
        in_flight = np.asarray(num_in_flight, np.float64)
        held = (self.lengths.second_moment / self.lengths.mean - 1) / 2
        times: Float64Array = self.step_cost.step_times(in_flight) + self.step_cost.per_token * held * in_flight
        return times

    def check_num_engines(self, num_engines: int) -> None:
        """Whether so many engines leave a GPU to train. Raises: ScenarioError."""
        if not 0 < num_engines <= self.max_engines:
            raise ScenarioError(
                f"cluster.num_engines = {num_engines}: of {self.num_gpus} GPUs and {self.gpus_per_engine} per engine,"
                f" {'1' if self.max_engines == 1 else f'1 to {self.max_engines}'} would work"
            )

    @property
    def max_engines(self) -> int:
        """The most that leave a GPU to train. Raises: ScenarioError if there is none."""
        most = (self.num_gpus - 1) // self.gpus_per_engine
        if most < 1:
            raise ScenarioError(
                f"cluster.num_gpus = {self.num_gpus}: too few for an engine of {self.gpus_per_engine} and a trainer;"
                f" {self.gpus_per_engine + 1} would work"
            )
        return most

    @property
    def num_colocated_engines(self) -> int:
        """Of schedules that take turns: all GPUs generate. Raises: ScenarioError if that leaves some over."""
        if self.num_gpus % self.gpus_per_engine:
            raise ScenarioError(
                f"cluster.num_gpus = {self.num_gpus} is not a multiple of gpus_per_engine = {self.gpus_per_engine}:"
                " some would never generate"
            )
        return self.num_gpus // self.gpus_per_engine
