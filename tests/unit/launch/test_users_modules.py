"""Modules of the user's own parts: found beside the recipe, never mistaken for others; paths in their options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midflight.config import load_recipe
from midflight.errors import RecipeError
from midflight.launch import users_modules
from midflight.launch.environments import build_environment
from midflight.launch.users_modules import anchored_options
from midflight.run.directory import create_run, open_run

TASK = """
from __future__ import annotations
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from midflight.testing.fakes import CountingEnvironment

if TYPE_CHECKING:
    from fractions import Fraction

class Task(CountingEnvironment):
    name = {name!r}

    def __init__(self, table: Path | None = None, files: Sequence[Path] = (), title: str = "") -> None:
        super().__init__()
        self.table, self.files, self.title = table, files, title

def task(table: Path, share: Fraction | None = None) -> Task:
    return Task(table)
"""
WriteProject = Callable[..., Path]


@pytest.fixture
def write_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteProject]:
    """Return a function that writes a recipe with a module beside it, in a directory of this name."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(users_modules, "_directory", None)
    monkeypatch.setattr(users_modules, "_entry", "")

    def write(name: str, module: str = "tasks_beside", text: str = TASK, options: str = "") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / f"{module}.py").write_text(text.replace("{name!r}", repr(name)))
        recipe = directory / "recipe.toml"
        recipe.write_text(f'[model]\npath = "m"\n[task]\ntype = "{module}:Task"\noptions = {{{options}}}\n')
        return recipe

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_module_beside_the_recipe_is_found(write_project: WriteProject) -> None:
    environment = build_environment(load_recipe(write_project("one")))
    assert vars(type(environment))["name"] == "one"


def test_resumed_run_finds_the_module_of_its_recipe(write_project: WriteProject, tmp_path: Path) -> None:
    run = create_run(load_recipe(write_project("one"), [f"run.directory={tmp_path / 'run'}"]))
    _, recipe = open_run(run.path, [])
    assert recipe.run.recipe_directory == tmp_path / "one"
    assert vars(type(build_environment(recipe)))["name"] == "one"


def test_the_recipe_comes_before_the_working_directory(
    write_project: WriteProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_project("one"))
    monkeypatch.chdir(write_project("two").parent)
    sys.path.append(str(tmp_path / "two"))
    assert vars(type(build_environment(recipe)))["name"] == "one"


def test_modules_of_one_name_beside_two_recipes_do_not_clash_silently(
    write_project: WriteProject, tmp_path: Path
) -> None:
    one, two = load_recipe(write_project("one")), load_recipe(write_project("two"))
    build_environment(one)
    with pytest.raises(RecipeError) as raised:
        build_environment(two)
    found, imported = tmp_path / "two" / "tasks_beside.py", tmp_path / "one" / "tasks_beside.py"
    assert str(raised.value) == (
        f"task.type: cannot import 'tasks_beside:Task': there are two modules tasks_beside: {found} beside the recipe,"
        f" and {imported}, which is imported first; another name for the file would work"
    )
    build_environment(one)


@pytest.mark.parametrize("name", ["statistics", "sys"])
def test_module_with_the_name_of_a_library_is_refused(name: str, write_project: WriteProject) -> None:
    with pytest.raises(RecipeError, match=f"two modules {name}: .*/one/{name}.py beside the recipe, and "):
        build_environment(load_recipe(write_project("one", name)))


def test_missing_module_names_the_directories(
    write_project: WriteProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_project("one"), ["task.type=nowhere:Task"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as raised:
        build_environment(recipe)
    assert str(raised.value).endswith(f"No module named 'nowhere' in {tmp_path / 'one'} or {tmp_path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import json\n\njson.loads('{')", r"JSONDecodeError: .*one/tasks_beside\.py:3\)$"),
        ("\nimport no_such_library", r"No module named 'no_such_library' \(.*one/tasks_beside\.py:2\)$"),
        ("def Task(:", r"SyntaxError: invalid syntax \(tasks_beside\.py, line 1\)"),
        ("Tusk = 1", r"module 'tasks_beside' has no attribute 'Task' \(.*one/tasks_beside\.py\)$"),
    ],
)
def test_error_in_the_module_has_file_and_line(text: str, message: str, write_project: WriteProject) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        build_environment(load_recipe(write_project("one", text=text)))
    assert "\n" not in str(raised.value)


def test_options_annotated_as_paths_are_relative_to_the_recipe(write_project: WriteProject, tmp_path: Path) -> None:
    recipe = load_recipe(write_project("one", options='table = "t.csv", files = ["a", "/b"], title = "t.csv"'))
    values = vars(build_environment(recipe))
    assert values["table"] == tmp_path / "one" / "t.csv"
    assert values["files"] == [tmp_path / "one" / "a", Path("/b")]
    assert values["title"] == "t.csv"


def test_annotations_for_type_checkers_are_read_as_text(write_project: WriteProject, tmp_path: Path) -> None:
    recipe = load_recipe(write_project("one"), ["task.type=tasks_beside:task", "task.options.table=t.csv"])
    assert vars(build_environment(recipe))["table"] == tmp_path / "one" / "t.csv"


def test_without_a_recipe_file_options_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_modules, "_directory", None)
    monkeypatch.chdir(tmp_path)

    def part(table: Path) -> Path:
        return table

    assert anchored_options(part, {"table": "t.csv", "unknown": 3}) == {"table": tmp_path / "t.csv", "unknown": 3}
