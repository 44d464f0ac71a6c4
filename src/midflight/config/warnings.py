"""Warnings about a recipe: combinations that run, but that have an effect not everyone expects."""

from __future__ import annotations

from midflight.config.recipe import Recipe


def recipe_warnings(recipe: Recipe) -> list[str]:
    """Return one line for each warning."""
    warnings = []
    if recipe.sampling.is_truncated:
        values = {name: getattr(recipe.sampling, name) for name in ("top_p", "top_k", "min_p")}
        defaults = {name: field.default for name, field in type(recipe.sampling).model_fields.items()}
        keys = ", ".join(f"sampling.{name} = {value}" for name, value in values.items() if value != defaults[name])
        warnings.append(
            f"{keys}: log-probabilities of sampled tokens are of the truncated distribution, and the trainer does not"
            " truncate, so the importance ratios are biased; without truncation they are exact"
        )
    return warnings
