"""The README is executed: its Python runs, its commands exist, its tree is the tree. Links of every page work."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from scripts import script

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    str(page.relative_to(ROOT)) for folder in (".", "bench", "docs", "docs/*") for page in ROOT.glob(f"{folder}/*.md")
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_python_runs(smollm2: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks("python"))], capture_output=True, text=True, check=True
    )
    assert len(run.stdout.split()) > 20
    assert run.stderr == ""


@pytest.mark.slow
def test_the_terminal_shows_what_the_commands_write(smollm2: Path) -> None:
    """To the letter on processors that round as the one that drew it did; but for speeds, of course."""
    from pronk import _native

    made = script(ROOT / "docs" / "make_terminal.py")
    texts = re.findall(r"<text [^>]*>(.*?)</text>", made.PICTURE.read_text(encoding="utf-8"))
    shown = [line for line in map(unescape, texts) if "tok/s" not in line and not line.startswith("peak ")]
    for command in made.COMMANDS:
        answered = [line for colour, line in made.lines(command) if colour != made.DIM]
        assert answered[0] == shown[0]
        assert len(answered) > 1
        assert answered == shown[: len(answered)] or not _native.isa().startswith("avx512")
        shown = shown[shown.index("") + 1 :] if "" in shown else []


def test_the_first_two_commands_are_the_ones_that_ci_and_newcomers_run() -> None:
    first, second = (block.strip() for block in blocks("bash")[:2])
    assert first == 'pip install . && pronk generate "Three good reasons to plant a tree:"'
    assert second == 'pip install -e ".[test]" && pytest -n 2'
    assert "sed -n" in (ROOT / ".ci" / "run").read_text()  # CI takes the second out of this file


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]+))?\)", (ROOT / page).read_text(encoding="utf-8")):
        there = (ROOT / page).parent / target if target else ROOT / page
        assert there.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(there), f"{page}: {target}#{anchor}"


def test_the_tree_names_what_exists() -> None:
    tree = re.search(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree
    for line in tree[1].splitlines():
        inside = ROOT / "src" / "pronk" if line.startswith("  ") else ROOT
        names = re.split(r"\s{4,}", line.strip())[0].split()
        for name in names:
            assert (inside / name).exists(), name


def test_the_report_is_what_the_script_makes_of_its_figures(tmp_path: Path) -> None:
    made = script(ROOT / "docs" / "make_report.py")
    shutil.copy(ROOT / "docs" / "report" / "report.json", tmp_path)
    without_tables = re.compile(r"(<!-- table: \w+ -->\n).*?(<!-- end of table -->)", re.DOTALL)
    page = made.page(tmp_path)
    assert page == without_tables.sub(r"\1\2", (ROOT / "REPORT.md").read_text(encoding="utf-8"))
    for picture in (tmp_path / "plots").iterdir():
        assert picture.read_bytes() == (ROOT / "docs" / "report" / "plots" / picture.name).read_bytes()
