"""Modules of the user's own parts: found in the recipe's directory first, then in the working directory.

`sys.path` and the imported modules belong to the process, and so does the directory of the recipe in use. Processes of
a run enter it themselves.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from midflight.config import Recipe
from midflight.errors import RecipeError

_directory: Path | None = None
_entry = ""  # in sys.path for the directory; empty if the directory was there before


def use_directory_of(recipe: Recipe) -> None:
    """Import the user's modules from the recipe's directory from now on, in place of the directory of another recipe.

    The directory comes before the working directory and after all packages, so that no file in it replaces a package.
    """
    global _directory, _entry
    if _entry in sys.path:
        sys.path.remove(_entry)
    _directory, _entry = recipe.run.recipe_directory, ""
    if _directory is not None and str(_directory) not in sys.path:
        _entry = str(_directory)
        sys.path.insert(len(sys.path) - (sys.path[-1:] == [str(Path.cwd())]), _entry)


def import_users_module(name: str) -> ModuleType:
    """Import a module.

    Raises: RecipeError if the recipe's directory has another module of this name; any error of the module itself.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import in the module
        searched = dict.fromkeys([_directory, Path.cwd()]) if _directory else ()
        places = f" in {' or '.join(map(str, searched))}" if searched else ""
        raise RecipeError(f"{error}{places}") from error
    _check_file(module)
    return module


def _check_file(module: ModuleType) -> None:
    """Check that a module beside the recipe is the imported one, not a package or a module beside another recipe."""
    if _directory is None:
        return
    first = module.__name__.partition(".")[0]
    imported = Path(getattr(sys.modules[first], "__file__", None) or "a built-in module")
    for beside in (_directory / f"{first}.py", _directory / first / "__init__.py"):
        if beside.is_file() and not (imported.is_file() and imported.samefile(beside)):
            raise RecipeError(
                f"there are two modules {first}: {beside} beside the recipe, and {imported}, which is imported first;"
                " another name for the file would work"
            )


def anchored_options(target: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with texts as paths if the parameter's annotation is Path.

    Relative paths start in the recipe's directory.
    """
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError:  # an annotation is imported for type checkers only
        signature = inspect.signature(target)
    parameters = signature.parameters
    return {
        key: _anchored(value, parameters[key].annotation) if key in parameters else value
        for key, value in options.items()
    }


def _anchored(value: Any, annotation: Any) -> Any:
    is_path = Path in (annotation, *get_args(annotation)) or annotation in ("Path", "Path | None")
    if is_path and isinstance(value, str):
        return (_directory or Path.cwd()) / Path(value).expanduser()
    return [_anchored(item, annotation) for item in value] if isinstance(value, list) else value
