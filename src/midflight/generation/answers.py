"""Answers of a server that refuse a request, as exceptions."""

from __future__ import annotations

import httpx

from midflight.errors import (
    GenerationError,
    MidflightError,
    NonFiniteWeightsError,
    RequestError,
    WeightUpdateError,
)


def refusal_of(response: httpx.Response) -> MidflightError:
    """Convert an error response into one of our exceptions.

    Raises: ValueError if the response is not in the OpenAI format.
    """
    try:
        error = response.json()["error"]
        message, kind, code = error["message"], error["type"], error["code"]
    except (KeyError, TypeError) as unexpected:
        raise ValueError(f"status {response.status_code} with {response.text[:80]!r}") from unexpected
    if code == "weights_not_finite":
        return NonFiniteWeightsError(message)
    if kind == "weight_update_error" or code == "update_in_progress":
        return WeightUpdateError(message)
    return RequestError(message) if response.status_code < 500 else GenerationError(message)


def reason_of(error: Exception) -> str:
    """Text of an exception, or the name of its type if it has no text."""
    return str(error) or type(error).__name__
