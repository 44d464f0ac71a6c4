"""Narrow a type to what a test knows, and fail where the value is something else."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return a value that is not None."""
    assert value is not None
    return value


def instance(value: object, expected: type[T]) -> T:
    """Return a value that is an instance of `expected`."""
    assert isinstance(value, expected), f"{value!r} is not a {expected.__name__}"
    return value
