"""Recipe -> rewards. Imports no torch: grading processes come here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midflight.config.tasks import RewardTerm
from midflight.envs.rewards.signatures import reward_function
from midflight.envs.rewards.terms import Rewards, Term
from midflight.errors import RecipeError
from midflight.launch.importing import Joint, users_code
from midflight.launch.users_modules import anchored_options

_MODULE = "midflight.envs.rewards"
REWARDS: Joint[Any] = Joint(
    "task.rewards",
    {
        "code": f"{_MODULE}.code:Code",
        "exact": f"{_MODULE}.exact:Exact",
        "json_schema": f"{_MODULE}.json_schema:JsonSchema",
        "judge": f"{_MODULE}.judge:Judge",
        "language": f"{_MODULE}.language:Language",
        "math": f"{_MODULE}.math:Math",
        "multiple_choice": f"{_MODULE}.multiple_choice:MultipleChoice",
        "numeric": f"{_MODULE}.numeric:Numeric",
        "regex": f"{_MODULE}.formats:Regex",
        "soft_length": f"{_MODULE}.soft_length:SoftLength",
        "think_format": f"{_MODULE}.formats:think_format",
    },
)
_RESERVED = ("mean", "length_penalty")


def build_rewards(terms: Sequence[RewardTerm]) -> Rewards:
    """Return the sum of the terms.

    Raises: RecipeError if a function cannot be imported or called, does not take its options, or shares its name.
    """
    return Rewards([_build(term) for term in terms])


def term_name(term: RewardTerm) -> str:
    """Name of a term in the metrics: its own, or that of its reward or function."""
    return term.name or term.type.rpartition(":")[2]


def _build(term: RewardTerm) -> Term:
    target = REWARDS.find(term.type)
    with users_code(f"task.rewards: {term.type}"):
        function = reward_function(term.type, target, anchored_options(target, term.options))
    name = term_name(term)
    if name in _RESERVED:
        raise RecipeError(f"task.rewards: {term.type}: name = {name!r} is a metric of the run; use another one")
    return Term(name, function, term.weight)
