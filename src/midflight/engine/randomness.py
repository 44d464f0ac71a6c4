"""The random numbers of a rollout depend on (seed, rollout id, position) and on nothing else.

So a sequence that is interrupted, resumed, or run beside other neighbors draws the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midflight.types import Float32Array

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def stream_key(seed: int, rollout_id: int) -> np.uint64:
    """What tells the random numbers of one rollout from those of every other."""
    return np.uint64(_mix_int(_mix_int(seed & _MASK) ^ ((rollout_id * _GOLDEN) & _MASK)))


def uniforms_at(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> Float32Array:
    """One number in [0, 1) for each (stream key, response position), both [B].

    Source: SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator.
    """
    bits = (positions + 1).astype(np.uint64) * np.uint64(_GOLDEN) + keys
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    # 24 bits are what a float32 in [0, 1) can hold exactly; rounding more bits could give 1.0.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix_int(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
