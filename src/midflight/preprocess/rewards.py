"""Rewards that depend on the length of a response."""

from __future__ import annotations

from midflight.types import Float64Array, Int32Array


def overlong_penalty(lengths: Int32Array, max_tokens: int, buffer: int) -> Float64Array:
    """0 up to max_tokens - buffer, from there falling linearly to -1 at max_tokens.

    Shapes: lengths [N], response tokens -> [N]. Units: tokens.
    Source: DAPO (Yu et al. 2025), eq. 13; PipelineRL, sec. 5.
    """
    over = (lengths - (max_tokens - buffer)).clip(min=0)
    return -over / max(buffer, 1)
