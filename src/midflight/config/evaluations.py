"""[eval]: the problems of evaluations, and when they take place."""

from __future__ import annotations

import pydantic
from pydantic import Field

from midflight.config.section import Section
from midflight.config.tasks import Source
from midflight.types import TEMPERATURES

HELD_OUT = "held_out"  # name of the set of the task's held-out problems


class EvalSet(Section):
    """One set of problems to evaluate, with its own rewards and sampling parameters."""

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$", description="name of the set in results and metrics")
    task: Source = Field(description="source of the problems; a dataset's rows are all used, or its held-out rows")
    num_problems: int | None = Field(None, ge=1, description="number of problems; default: all of a dataset, or 512")
    samples: int = Field(
        1, ge=1, description="responses per problem: the k of avg@k and maj@k, and the largest of pass@k"
    )
    temperature: float = Field(1.0, ge=0, le=TEMPERATURES[1], description="temperature; 0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="as sampling.top_p")
    top_k: int = Field(0, ge=0, description="as sampling.top_k")
    min_p: float = Field(0.0, ge=0, lt=1, description="as sampling.min_p")
    max_tokens: int | None = Field(
        None, ge=1, description="largest length of a response, tokens; default: sampling.max_tokens"
    )


class EvalConfig(Section):
    num_problems: int = Field(
        512, ge=0, description="number of held-out problems, evaluated before and after the run; 0: no evaluation"
    )
    num_in_flight: int = Field(
        256,
        ge=1,
        description="responses in flight; during a run, at most as many as the schedule has rollouts in flight",
    )
    every: int | None = Field(
        None,
        ge=1,
        description="evaluate during the run, after every so many optimizer steps: the run's engines answer beside the"
        " rollouts; default: only before and after the run",
    )
    sets: tuple[EvalSet, ...] = Field((), description="[[eval.sets]]: further problems to evaluate")
    hard_from: int = Field(5, ge=0, description="accuracy is also reported for problems of at least this difficulty")

    @pydantic.model_validator(mode="after")
    def check_names(self) -> EvalConfig:
        names = [item.name for item in self.sets]
        for name in names:
            if name == HELD_OUT:
                raise ValueError(f"sets: {name!r} is the name of the task's held-out problems; choose another name")
            if names.count(name) > 1:
                raise ValueError(f"sets: {name!r} is the name of {names.count(name)} sets; each needs its own name")
        return self

    @property
    def has_problems(self) -> bool:
        """True if an evaluation has any problems."""
        return bool(self.num_problems or self.sets)

    @property
    def interval(self) -> int | None:
        """Optimizer steps between evaluations during a run; None: there are none."""
        return self.every if self.has_problems else None
