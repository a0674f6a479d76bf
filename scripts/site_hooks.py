"""What mkdocs calls to build the site from the files of the repository as they are.

Pages outside of docs/ become pages of the site. A link to any other file becomes a link to a copy of it; a link to a
folder becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    **{
        name: name
        for name in (
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "recipes/trainers/README.md",
            "recipes/torchtitan/README.md",
        )
    },
}
"""Files of the repository that are no pages of docs/, and their places on the site."""

FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
IMAGES = {".svg", ".png"}


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def rewritten(markdown: str, path: str, linked: set[str]) -> str:
    """Give a page of the repository with links as the site has them, and collect the files that it links to."""
    here = posixpath.dirname(place(path))

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or re.match(r"\w+:", target):
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if (ROOT / found).is_dir():
            return match[1][1:-1]
        linked.add(found)
        shown = posixpath.relpath(place(found), here or ".")
        return f"{match[1]}({shown}{f'#{anchor}' if anchor else ''})"

    parts = FENCE.split(markdown)
    # Python-Markdown takes lines behind a comment for a part of it, and text in <details> for HTML.
    prose = [re.sub(r"^(<!-- .* -->)\n", r"\1\n\n", part, flags=re.MULTILINE) for part in parts[::2]]
    prose = [LINK.sub(link, part).replace("<details>", "<details markdown>") for part in prose]
    return "".join(text for pair in zip(prose, [*parts[1::2], ""], strict=True) for text in pair)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, and the files that any page links to."""
    linked: set[str] = set()
    for path, uri in PAGES.items():
        text = rewritten((ROOT / path).read_text(), path, linked)
        files.append(File.generated(config, uri, content=text))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        rewritten(page.read_text(), str(page.relative_to(ROOT)), linked)
    written: set[str] = set()
    # A page that only a link leads to may link to more files.
    while left := {path for path in linked - written if place(path).startswith("source/")}:
        for path in sorted(left):
            content = (ROOT / path).read_bytes()
            if path.endswith(".md"):
                content = rewritten(content.decode(), path, linked).encode()
            files.append(File.generated(config, place(path), content=content))
        written |= left
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page of docs/."""
    path = f"docs/{page.file.src_uri}"
    return (
        rewritten(markdown, path, set())
        if (ROOT / path).exists() and page.file.src_uri != "index.md"
        else markdown
    )
