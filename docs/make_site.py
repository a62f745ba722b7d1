"""Gathers the pages of the documentation site and builds it: python docs/make_site.py (needs the extra `docs`)

The pages are the repository's own Markdown, each at a place of its own (PAGES). A link to another page or to a picture
is turned to where that lies on the site; of a link to anything else, a source file say, its words stay.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "site"  # as zensical.toml has it
PICTURES = {".svg", ".png"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]+)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)

_ELSEWHERE = {
    "README.md": "index.md",
    "REPORT.md": "report.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benchmarking.md",
    "bench/NOTES.md": "benchmark-notes.md",
    "examples/prompts/README.md": "prompts.md",
    "docs/training/TRAINING.md": "training-techniques.md",
    "docs/how-it-works/README.md": "how-it-works/index.md",
}


def pages() -> dict[str, str]:
    """The path of each page in the repository, and on the site."""
    own = [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))]
    return {page: page.removeprefix("docs/") for page in own} | _ELSEWHERE


def turned(text: str, page: str, places: dict[str, str]) -> tuple[str, dict[str, str]]:
    """A page's text as the site has it, and the pictures it shows: the path of each, and its place on the site."""
    pictures: dict[str, str] = {}
    here = PurePosixPath(places[page]).parent

    def link(found: re.Match[str]) -> str:
        mark, words, target, anchor = found.groups()
        path = os.path.normpath(PurePosixPath(page).parent / target)
        if path in places:
            place = places[path]
        elif PurePosixPath(path).suffix in PICTURES:
            place = pictures[path] = f"pictures/{path}"
        else:
            return words
        return f"{mark}[{words}]({os.path.relpath(place, here)}{anchor or ''})"

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]  # what stands in fences is shown as it is
    return "".join(parts), pictures


def gather() -> None:
    """Write all pages, and the pictures they show, where zensical.toml looks for them."""
    shutil.rmtree(BUILD, ignore_errors=True)
    places = pages()
    for page, place in places.items():
        text, pictures = turned((ROOT / page).read_text(encoding="utf-8"), page, places)
        for path in (BUILD / "pages" / place, *(BUILD / "pages" / picture for picture in pictures.values())):
            path.parent.mkdir(parents=True, exist_ok=True)
        (BUILD / "pages" / place).write_text(text, encoding="utf-8")
        for path, picture in pictures.items():
            shutil.copy(ROOT / path, BUILD / "pages" / picture)
    shutil.copy(ROOT / "docs" / "site.css", BUILD / "pages" / "site.css")


if __name__ == "__main__":
    gather()
    sys.exit(subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT).returncode)
