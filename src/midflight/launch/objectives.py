"""Recipe -> objective: the loss by its name or import path, and what is added to it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from midflight.config import Recipe
from midflight.config.algorithms import (
    CispoConfig,
    CustomLossConfig,
    DapoConfig,
    DecoupledPpoConfig,
    GrpoConfig,
    GspoConfig,
    PpoConfig,
    ReinforceConfig,
)
from midflight.errors import RecipeError
from midflight.launch.importing import import_object
from midflight.losses.cispo import cispo
from midflight.losses.dapo import dapo
from midflight.losses.decoupled_ppo import decoupled_ppo
from midflight.losses.grpo import grpo
from midflight.losses.gspo import gspo
from midflight.losses.inputs import Loss, LossOutput
from midflight.losses.objective import Objective
from midflight.losses.ppo import ppo
from midflight.losses.reinforce import reinforce

_CLIPPED: dict[type, Callable[..., LossOutput]] = {
    GrpoConfig: grpo,
    DapoConfig: dapo,
    GspoConfig: gspo,
    PpoConfig: ppo,
    DecoupledPpoConfig: decoupled_ppo,
}


def build_objective(recipe: Recipe) -> Objective:
    """Raises: RecipeError if a function of the user's cannot be found or does not take its options."""
    loss, advantage = recipe.loss, recipe.advantage
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
        gae_lambda=advantage.gae_lambda if advantage.type == "value" else None,
        value_coefficient=advantage.value_coefficient,
        value_clip=advantage.value_clip,
        proximal_every=getattr(loss, "proximal_every", None),
    )


def build_loss(recipe: Recipe) -> Loss:
    """The policy's part of the objective. Raises: RecipeError."""
    loss = recipe.loss
    match loss:
        case ReinforceConfig():
            return functools.partial(reinforce, max_ratio=loss.max_ratio)
        case CispoConfig():
            return functools.partial(cispo, clip_low=loss.clip_low, clip_high=loss.clip_high)
        case CustomLossConfig():
            return _custom_loss(loss)
    return functools.partial(
        _CLIPPED[type(loss)], clip_low=loss.clip_low, clip_high=loss.clip_high, max_ratio=loss.max_ratio
    )


def _custom_loss(config: CustomLossConfig) -> Loss:
    function = import_object("loss.function", config.function)
    try:
        inspect.signature(function).bind(None, **config.options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"loss.options: {config.function} does not take them: {error}") from error
    return functools.partial(function, **config.options)
