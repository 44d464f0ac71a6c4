"""Wheel installed outside the repository and run in an empty directory, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from midflight.config import load_recipe
from midflight.metrics.jsonl import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = ("batch.batch_size=16", "schedule.num_in_flight=16", "eval.num_problems=32", "trainer.max_steps=3")


@dataclass(frozen=True)
class Installed:
    """Directory with the files of the wheel, and none of this repository."""

    site: Path

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command with the installed midflight instead of the midflight under test."""
        environment = os.environ | {"PYTHONPATH": str(self.site), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done

    def midflight(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.site / "bin" / "midflight"), *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("hatchling")
    scratch = tmp_path_factory.mktemp("install")
    built, site = scratch / "dist", scratch / "site"
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = built.iterdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=120)
    with ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "__pycache__" in name]
    return Installed(site)


def test_the_demo_runs_from_the_wheel_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    done = installed.midflight("demo", *SMALL, "--json", cwd=tmp_path)
    summary = json.loads(done.stdout)
    assert summary["steps"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    (run,) = (tmp_path / "runs").iterdir()
    assert len(read_metrics(run / "metrics.jsonl")) == 3
    assert load_recipe(run / "config.toml").model.path.is_relative_to(installed.site)
    before, after = (summary[when]["sampled_accuracy"] for when in ("eval_before", "eval_after"))
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"held-out accuracy {before:.3f} -> {after:.3f}; next: `midflight report runs/{run.name}`")
    assert "a3,3b9,12c4,16=16 is right" in done.stderr


def test_a_new_project_passes_its_tests_and_trains(installed: Installed, tmp_path: Path) -> None:
    assert "next: cd mine" in installed.midflight("new", "mine", cwd=tmp_path).stdout
    project = tmp_path / "mine"
    assert {path.name for path in project.iterdir()} == {
        "README.md", "digit_sums.py", "model", "recipe.toml", "test_digit_sums.py",
    }  # fmt: skip
    tests = installed.run(sys.executable, "-m", "pytest", "-q", cwd=project)
    assert "3 passed" in tests.stdout
    summary = json.loads(installed.midflight("train", "recipe.toml", *SMALL, "--json", cwd=project).stdout)
    assert summary["steps"] == 3
    assert summary["groups"]["failed"] == 0
    assert summary["eval_after"]["num_problems"] == 32
