"""Documentation site: builds with every link checked, and loads nothing from other hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("material", reason="the extra `docs` is not installed")
pytestmark = pytest.mark.slow

# Resources that a browser fetches without a click; links may lead to other hosts.
FETCHED = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="?(https?:[^"\s>]+)|<link[^>]*\shref="?(https?:[^"\s>]+)')


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", out)
    assert built.returncode == 0, built.stderr
    return out


def test_pages_of_docs_and_linked_files_are_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).is_file(), page.name
    source = (site / "repository" / "src" / "midflight" / "losses" / "grpo.py.html").read_text()
    assert "<code>src/midflight/losses/grpo.py</code>" in source
    assert '<span class="k">def</span>' in source
    assert (site / "repository" / "CONTRIBUTING.html").is_file()


def test_pages_fetch_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert [found for page in pages for found in FETCHED.findall(page.read_text())] == []


@pytest.mark.parametrize("link", ["missing.md", "../src/missing.py", "other.md#missing"])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs" / "repository_pages.py", docs)
    (docs / "index.md").write_text(f"# A page\n\n[a link]({link}) and [another](other.md)\n")
    (docs / "other.md").write_text("# Another\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0].replace("  - site.css\n", "  - other.css\n")
    (docs / "other.css").touch()
    (tmp_path / "mkdocs.yml").write_text(config)
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert link.partition("#")[2] or link in built.stderr
