"""Settings of glibc's allocator. Other C libraries are left as they are."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3  # from <malloc.h>
_LARGE_BYTES = 1 << 20


def return_large_blocks_at_once() -> None:
    """Make glibc return every large block to the system when it is freed.

    By default glibc keeps the memory of freed layers in fragments that later layers do not fit into, which costs more
    memory than sharding saves.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_freed_memory() -> None:
    """Return all memory that is free now, such as gradients and activations after a step, to the system.

    Takes about 50 ms for 1 GB, and as long again when the memory is next used.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
