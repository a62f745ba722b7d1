"""Pages of a run's folder: each one file, which asks for nothing and runs nothing, made anew while the run goes on.

What models wrote is hostile: all of it is escaped by the template, signs stand for what would turn the direction of
the page, and the page's own policy lets no script run and nothing be fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pronk import terminal
from pronk.drawing import svg
from pronk.system import replacing

if TYPE_CHECKING:
    from jinja2 import Template

_CHARACTERS = 2000  # of a text

Item = TypeVar("Item")


def write(path: Path, template: tuple[str, str], said: Mapping[str, Any]) -> None:
    """`template`: the package and the name of its file. Raises OSError; what was there stays."""
    text = _template(*template).render({"name": path.parent.resolve().name, "themes": [svg.LIGHT, svg.DARK], **said})
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="\n")


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """The first, the last, and some of those between."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def clipped(text: str) -> tuple[str, int]:
    """With how many characters were left out."""
    return terminal.shown(text[:_CHARACTERS]), max(0, len(text) - _CHARACTERS)


@cache
def _template(package: str, name: str) -> Template:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    found = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(lambda name: files(package).joinpath(name).read_text(encoding="utf-8")),
    )  # fmt: skip
    return found.get_template(name)
