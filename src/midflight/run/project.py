"""Projects of users: a task, its test, a recipe and a model, written from the files in `project_template/`."""

from __future__ import annotations

import shutil
from pathlib import Path

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import RunDirectoryError
from midflight.run.directory import create_directory

_TEMPLATE = Path(__file__).parents[1] / "project_template"


def write_project(directory: Path) -> None:
    """Write a new project.

    Raises: RunDirectoryError if the directory is not empty or cannot be written.
    """
    create_directory(directory)
    model = directory / "model"
    try:
        model.mkdir()
        for source, target in ((_TEMPLATE, directory), (load_recipe(SHIPPED_RECIPES["cpu_demo"]).model.path, model)):
            for file in source.iterdir():
                if file.is_file():
                    shutil.copyfile(file, target / file.name)
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {directory}: {error.strerror}") from error
