"""Problems drawn from several sources by weight; each source grades its own problems.

The source of an index is drawn at random, a pure function of the seed and the index. Each source counts its own draws,
so that no problem of a source is skipped.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midflight.envs.one_turn import GroupGradedTask, wants_group, with_turns
from midflight.errors import RecipeError
from midflight.protocols import Environment, GradedTask
from midflight.types import Grade, Int64Array, Problem, Text

_BLOCK = 1024  # indices whose sources are drawn at a time
_STREAM = zlib.crc32(b"mixture")  # makes the numbers independent of other numbers drawn from the seed


@dataclass(frozen=True, slots=True)
class Share:
    """A source of a mixture; `weight` is relative to the other sources."""

    name: str
    weight: float
    environment: Environment | GradedTask


class Draws:
    """Source of every index, drawn by weight, and the number of earlier draws from the same source.

    Only the counts of each block of indices are kept, so the memory grows by some bytes per thousand indices.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        total = np.cumsum(np.asarray(weights, np.float64))
        # Boundaries between sources, for 53-bit random numbers. NumPy keeps the raw output of a generator stable.
        self._boundaries = (total[:-1] / total[-1] * 2.0**53).astype(np.uint64)
        self._num_sources, self._seed = len(weights), seed
        self._counts: list[Int64Array] = [np.zeros(len(weights), np.int64)]  # draws before each block
        self._block: tuple[int, Int64Array] = (0, self._drawn(0))

    def draw(self, index: int) -> tuple[int, int]:
        """Return the source of an index, and the number of earlier indices with the same source."""
        block, position = divmod(index, _BLOCK)
        while len(self._counts) <= block:
            drawn = np.bincount(self._drawn(len(self._counts) - 1), minlength=self._num_sources)
            self._counts.append(self._counts[-1] + drawn)
        if self._block[0] != block:
            self._block = block, self._drawn(block)
        sources = self._block[1]
        source = int(sources[position])
        return source, int(self._counts[block][source] + np.count_nonzero(sources[:position] == source))

    def _drawn(self, block: int) -> Int64Array:
        """Sources of the indices of a block."""
        numbers = np.random.PCG64([self._seed, block, _STREAM]).random_raw(_BLOCK) >> np.uint64(11)
        return np.searchsorted(self._boundaries, numbers, side="right").astype(np.int64)


class Mixture:
    """Implements GradedTask for sources of one turn.

    Invariants: `problem.source` is the name of the share that made the problem. Each share sees its own problems only.
    """

    def __init__(self, shares: Sequence[Share], seed: int = 0) -> None:
        self.shares = tuple(shares)
        self._by_name = {share.name: share.environment for share in shares}
        self._draws = Draws([share.weight for share in shares], seed)

    def problem(self, index: int) -> Problem:
        source, own_index = self._draws.draw(index)
        return _named(self.shares[source], self.shares[source].environment.problem(own_index))

    def first_problems(self) -> list[Problem]:
        """Return the first problem of every source."""
        return [_named(share, share.environment.problem(0)) for share in self.shares]

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        """Return held-out problems of every source in proportion to the weights; fewer if a source has fewer."""
        counts = apportioned([share.weight for share in self.shares], num_problems)
        return [
            _named(share, problem)
            for share, count in zip(self.shares, counts, strict=True)
            for problem in share.environment.held_out_problems(count)
        ]

    def environment_of(self, problem: Problem) -> Environment | GradedTask:
        """Return the environment that made the problem."""
        return self._by_name[problem.source]

    def wants_groups(self, problem: Problem) -> bool:
        """True if the problem's source grades all responses to it together."""
        return wants_group(self.environment_of(problem), problem)

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Grade | BaseException]:
        environment = self.environment_of(problem)
        assert isinstance(environment, GroupGradedTask)
        return environment.grade_group(problem, responses)

    def grade(self, problem: Problem, response: str) -> Grade:
        environment = self.environment_of(problem)
        assert not isinstance(environment, Environment), "an environment of turns needs MixtureOfTurns"
        return environment.grade(problem, response)


class MixtureOfTurns(Mixture):
    """Implements Environment for sources of which at least one has several turns."""

    _episode: Environment

    def reset(self, problem: Problem) -> Text:
        self._episode = copy.copy(with_turns(self.environment_of(problem)))
        return self._episode.reset(problem)

    def step(self, response: str) -> Text | Grade:
        return self._episode.step(response)


def build_mixture(shares: Sequence[Share], seed: int, key: str) -> Mixture:
    """Return the mixture; `key` is its key in the recipe. Raises: RecipeError if two sources have the same name."""
    names = [share.name for share in shares]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"{key}.sources: {names.count(name)} sources have the name {name!r}; give each its own")
    has_turns = any(isinstance(share.environment, Environment) for share in shares)
    return (MixtureOfTurns if has_turns else Mixture)(shares, seed)


def _named(share: Share, problem: Problem) -> Problem:
    return dataclasses.replace(problem, source=share.name)


def apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Shares of a total in proportion to the weights: whole numbers that add up to it."""
    ends = np.round(np.cumsum(weights) / np.sum(weights) * total).astype(int)
    return [int(count) for count in np.diff(ends, prepend=0)]
