"""Recipe -> objective: the loss, by name or import path, and the terms added to it."""

from __future__ import annotations

from midflight.config import Recipe
from midflight.config.algorithms import ValueAdvantageConfig
from midflight.launch.importing import Joint, own_options
from midflight.losses.inputs import Loss
from midflight.losses.objective import Objective

_NAMES = ("reinforce", "grpo", "dapo", "gspo", "cispo", "ppo", "decoupled_ppo")
LOSSES: Joint[Loss] = Joint("loss.type", {name: f"midflight.losses.{name}:{name}" for name in _NAMES})


def build_objective(recipe: Recipe) -> Objective:
    """Return the objective. Raises: RecipeError if the user's own loss is missing or does not take its options."""
    loss, advantage = recipe.loss, recipe.advantage
    values = advantage if isinstance(advantage, ValueAdvantageConfig) else None
    return Objective(
        build_loss(recipe),
        denominator=loss.denominator,
        max_response_tokens=recipe.sampling.max_tokens,
        max_ratio=loss.max_ratio,
        token_mask=loss.token_mask,
        sequence_mask=loss.sequence_mask,
        kl_coefficient=loss.kl_coefficient,
        kl_estimator=loss.kl_estimator,
        kl_unbiased=loss.kl_unbiased,
        entropy_coefficient=loss.entropy_coefficient,
        proximal_every=getattr(loss, "proximal_every", None),
        **(values.model_dump(exclude={"type"}) if values else {}),
    )


def build_loss(recipe: Recipe) -> Loss:
    """Return the policy loss, without the added terms. Raises: RecipeError."""
    loss = recipe.loss
    return LOSSES.bind(loss.type, dict(loss), own_options(loss))
