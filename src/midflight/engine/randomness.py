"""Random numbers of a rollout: a function of (seed, rollout id, position) and nothing else.

Therefore a sequence draws the same numbers after an interruption and beside any other sequences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midflight.types import Float32Array

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def stream_key(seed: int, rollout_id: int) -> np.uint64:
    """Return the key of a rollout's random numbers, a hash of the seed and the rollout id."""
    return np.uint64(_mix_int(_mix_int(seed & _MASK) ^ ((rollout_id * _GOLDEN) & _MASK)))


def uniforms_at(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> Float32Array:
    """Return one random number in [0, 1) for each pair of stream key and response position.

    Shapes: keys [B], positions [B] -> float32 [B].
    Source: SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator.
    """
    bits = (positions + 1).astype(np.uint64) * np.uint64(_GOLDEN) + keys
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    # A float32 in [0, 1) holds 24 bits exactly; more bits could be rounded up to 1.0.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix_int(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
