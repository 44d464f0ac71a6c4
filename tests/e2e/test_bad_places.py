"""Commands in directories that cannot be written, on real file systems: one line of error each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from refusals import Refused

needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--map-root-user", "true"]).returncode != 0,
    reason="needs user namespaces",
)

IN_MOUNT = """
set -e
mount -t tmpfs -o $1 none "$2"
cd "$2"
shift 2
exec "$@"
"""


def run_in_mount(directory: Path, options: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run midflight in a file system mounted with `options`; the limits apply to root, too."""
    command = ["unshare", "--mount", "--map-root-user", "bash", "-c", IN_MOUNT, "bash", options, str(directory)]
    return subprocess.run(
        [*command, sys.executable, "-m", "midflight", *arguments], capture_output=True, text=True, timeout=240
    )


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ro", "midflight: cannot write to {}/runs/cpu_demo-"),
        ("size=4k", "midflight: cannot write to {}/runs/cpu_demo-"),
        ("size=16k", "midflight: {}/runs/cpu_demo-"),
    ],
)
def test_the_demo_without_write_access_is_a_one_line_error(tmp_path: Path, options: str, message: str) -> None:
    done = run_in_mount(tmp_path, options, "demo", "eval.num_problems=0")
    assert done.returncode == 2, done.stderr
    _, _, errors = done.stderr.partition("ESS: 1 is on-policy\n\n")
    (line,) = errors.splitlines()
    assert line.startswith(message.format(tmp_path))
    assert line.endswith(("Read-only file system", "No space left on device", "disk is full"))


@needs_namespaces
@pytest.mark.parametrize(
    ("options", "reason"), [("ro", "Read-only file system"), ("size=100k", "No space left on device")]
)
def test_a_project_without_write_access_is_a_one_line_error(tmp_path: Path, options: str, reason: str) -> None:
    done = run_in_mount(tmp_path, options, "new", "mine")
    assert (done.returncode, done.stderr) == (2, f"midflight: cannot write to mine: {reason}\n")


@pytest.mark.parametrize("taken", ["file", "directory"])
def test_a_project_in_a_taken_place_is_a_one_line_error(tmp_path: Path, taken: str, refused: Refused) -> None:
    place = tmp_path / "mine"
    (place if taken == "file" else place / "thesis").parent.mkdir(exist_ok=True)
    (place if taken == "file" else place / "thesis").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    assert refused("new", place) == f"midflight: {place} exists and is not an empty directory"
    assert sorted(tmp_path.rglob("*")) == before
