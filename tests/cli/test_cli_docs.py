"""docs/cli.md is what the program says of itself."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_current() -> None:
    """Word for word; where the lines break is click's business, and changes with its version."""
    page = runpy.run_path(str(DOCS / "make_cli.py"))["page"]()
    assert page.split() == (DOCS / "cli.md").read_text(encoding="utf-8").split(), "run: python docs/make_cli.py"
