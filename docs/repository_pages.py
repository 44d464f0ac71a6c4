"""MkDocs hook: files of the repository that a page links to become pages of the site.

The same relative link then works in a clone, on a code host and in the site, and a link to a missing file fails the
strict build. Markdown files keep their text, source files become a page with highlighted code, data files are copied.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()(?!\w+:)([^()\s#]+)(?=[)#])")
LANGUAGES = {".py": "python", ".toml": "toml", ".c": "c", ".yml": "yaml", ".yaml": "yaml"}
DATA = {".json", ".png", ".svg"}


def site_path(path: Path, root: Path) -> str:
    """Place of a repository file in the site's sources."""
    inside = path.relative_to(root).as_posix()
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    if path.is_dir():
        return f"repository/{inside}/index.md"
    return f"repository/{inside}" if path.suffix in DATA | {".md"} else f"repository/{inside}.md"


def linked_files(markdown: str, folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield each link to an existing file of the repository, as written and resolved."""
    for link in LINK.findall(markdown):
        path = (folder / link).resolve()
        if path.exists() and path.is_relative_to(root):
            yield link, path


def with_site_links(markdown: str, folder: Path, source: str, root: Path) -> str:
    """Markdown whose links to files of the repository lead to their pages in the site."""
    targets = {
        link: posixpath.relpath(site_path(path, root), posixpath.dirname(source))
        for link, path in linked_files(markdown, folder, root)
    }
    return LINK.sub(lambda found: targets.get(found[0], found[0]), markdown)


def page_of(path: Path, source: str, root: Path) -> str:
    """Markdown of a linked file outside docs/: its text, its code, or the list of a folder's files."""
    if path.suffix == ".md":
        return with_site_links(path.read_text(), path.parent, source, root)
    title = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# `{path.relative_to(root).as_posix()}`\n\n"
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if not each.name.startswith(("_", ".")))
        return title + with_site_links("\n".join(f"- [{name}]({name})" for name in names), path, source, root)
    return f"{title}~~~~~~ {LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n~~~~~~\n"


def links_from(path: Path, root: Path) -> Iterator[Path]:
    """Yield the files that the page of a repository file links to."""
    if path.is_dir():
        yield from (each for each in path.iterdir() if not each.name.startswith(("_", ".")))
    elif path.suffix == ".md":
        yield from (target for _, target in linked_files(path.read_text(), path.parent, root))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a file to the site for every file of the repository that is linked, directly or from an added page."""
    root = Path(config.config_file_path).parent.resolve()
    waiting = [Path(config.docs_dir) / file.src_uri for file in files.documentation_pages()]
    while waiting:
        for path in links_from(waiting.pop(), root):
            source = site_path(path, root)
            if not source.startswith("repository/") or files.get_file_from_path(source) is not None:
                continue
            if source.endswith(".md"):
                waiting.append(path)
            content = page_of(path, source, root) if source.endswith(".md") else path.read_bytes()
            files.append(File.generated(config, source, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page of docs/; added pages have theirs already."""
    if page.file.generated_by is not None:
        return markdown
    root = Path(config.config_file_path).parent.resolve()
    return with_site_links(markdown, (root / "docs" / page.file.src_uri).parent, page.file.src_uri, root)
