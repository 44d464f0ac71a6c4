"""Rewards that depend on the length of a response."""

from __future__ import annotations

from midflight.types import Float64Array, Int32Array


def overlong_penalty(lengths: Int32Array, max_tokens: int, buffer: int) -> Float64Array:
    """Length penalty: 0 up to max_tokens - buffer, then linear down to -1 at max_tokens.

    Shapes: lengths [N] -> [N]. Units: lengths, max_tokens and buffer in response tokens.
    Source: DAPO (Yu et al. 2025), eq. 13; PipelineRL, sec. 5.
    """
    over = (lengths - (max_tokens - buffer)).clip(min=0)
    return -over / max(buffer, 1)
