"""What a recipe names by import path: the user's own environments and losses. Imports no torch itself."""

from __future__ import annotations

import importlib
from typing import Any

from midflight.actor.failures import reason_of
from midflight.errors import RecipeError


def import_object(key: str, path: str) -> Any:
    """The object that `package.module:name` stands for. `key`: of the recipe, for the error.

    Raises: RecipeError if there is no such module, it cannot be imported, or nothing of that name is in it.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"{key}: cannot import {path!r}: {error}") from error
    except Exception as error:
        raise RecipeError(f"{key}: cannot import {path!r}: {reason_of(error)}") from error
