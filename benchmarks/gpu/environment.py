"""Environment for `make gpu-check`, also without a network: a new virtual environment over the packages of this Python.

    environment.py VENV [WHEELS]     make the environment; missing packages come from a folder of wheels, or the index
    environment.py --requirements    print the packages to download for that folder

The script needs nothing but the standard library. PyTorch and transformers have to be installed already: their CUDA
builds are gigabytes. This Python may be that of a virtual environment, whose packages `venv --system-site-packages`
would not see. Therefore a .pth file lists the directories of this Python's packages.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_THERE_ALREADY = ("torch", "transformers")


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    if list(arguments) == ["--requirements"]:
        print("\n".join(["pip", *requirements()]))
    elif 1 <= len(arguments) <= 2:
        make_environment(Path(arguments[0]), Path(arguments[1]) if len(arguments) == 2 else None)
    else:
        sys.exit(__doc__)


def requirements() -> list[str]:
    """Return the dependencies of the project except those that have to be there already."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in project["dependencies"] if _name(each) not in _THERE_ALREADY]


def make_environment(venv: Path, wheels: Path | None) -> None:
    """Make the environment and install what is missing; exit with one line if that cannot be done."""
    for name in _THERE_ALREADY:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(f"gpu-check: {sys.executable} has no {name}; name a Python that has it: make gpu-check PYTHON=...")
    python = venv / "bin" / "python"
    if not python.exists():
        # Without pip: Debian's Python has no ensurepip.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    own = subprocess.run(
        [str(python), "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    )
    of_this_python = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [
        *(str(path) for path in (_ROOT / "src", _ROOT)),
        # addsitedir also reads the .pth files of that directory.
        *(f"import site; site.addsitedir({path!r})" for path in of_this_python),
    ]
    (Path(own.stdout.strip()) / "midflight-gpu-check.pth").write_text("\n".join(lines) + "\n")
    _install(python, wheels)
    check = "import torch, transformers, midflight.run.workers; print(torch.__version__, transformers.__version__)"
    done = subprocess.run([str(python), "-c", check], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"gpu-check: the environment does not work: {done.stderr.strip().splitlines()[-1]}")
    print(f"gpu-check: torch and transformers {done.stdout.strip()}", file=sys.stderr)


def _install(python: Path, wheels: Path | None) -> None:
    options = ["install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts", *requirements()]
    has_wheels = wheels is not None and wheels.is_dir()
    if wheels is not None and has_wheels:
        pip = next(iter(sorted(wheels.glob("pip-*.whl"))), None)
        if pip is None:
            sys.exit(f"gpu-check: {wheels} has no wheel of pip; `make gpu-wheels` fills the folder")
        # A wheel of pip runs without being installed.
        command = [str(python), str(pip / "pip"), *options, "--no-index", "--find-links", str(wheels)]
    else:
        command = [sys.executable, "-m", "pip", "--python", str(python), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
        source = f"from {wheels}" if has_wheels else "from the package index; name a folder of wheels: WHEELS=..."
        sys.exit(f"gpu-check: packages could not be installed {source}: {last}")


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
