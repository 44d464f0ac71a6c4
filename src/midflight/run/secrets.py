"""The secrets of a server, from its recipe, the environment and files."""

from __future__ import annotations

import os

import pydantic

from midflight.config import Recipe
from midflight.errors import RecipeError
from midflight.generation.access import Access, KeyFile, check_secret
from midflight.generation.addresses import is_loopback
from midflight.weights.engine_control import KEY_VARIABLE, TOKEN_VARIABLE


def access_of(recipe: Recipe) -> Access:
    """Return the secrets of the server.

    Raises: RecipeError if a secret is missing although other machines can reach the server, or cannot be used.
    """
    serve = recipe.serve
    token = _secret("serve.admin_token", serve.admin_token, TOKEN_VARIABLE)
    key = _secret("serve.api_key", serve.api_key, KEY_VARIABLE)
    key_file = None if serve.api_key_file is None else KeyFile(serve.api_key_file)
    if not is_loopback(serve.host):
        reason = f"serve.host = {serve.host!r} is not loopback, so"
        if token is None:
            raise RecipeError(
                f"{reason} an admin token is needed: set serve.admin_token or {TOKEN_VARIABLE}; host 127.0.0.1 would"
                " work without"
            )
        if key is None and key_file is None:
            raise RecipeError(
                f"{reason} an API key is needed: set serve.api_key, serve.api_key_file or {KEY_VARIABLE}; host"
                " 127.0.0.1 would work without"
            )
    access = Access(token, [key] if key else [], key_file)
    if token and access.is_key(token):
        raise RecipeError("the admin token is also an API key, so that every client could change weights; use another")
    return access


def _secret(key: str, value: pydantic.SecretStr | None, variable: str) -> str | None:
    secret = value.get_secret_value() if value else os.environ.get(variable)
    if not secret:
        return None
    check_secret(key if value else variable, secret)
    return secret
