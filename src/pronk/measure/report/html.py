"""A Document as one HTML file: styles and pictures inside, no scripts, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from pronk.measure.plot_style import colours
from pronk.measure.report.document import Document

if TYPE_CHECKING:
    from jinja2 import Template


def page(document: Document, pictures: Mapping[str, str]) -> str:
    """`pictures`: <svg> elements by name. All other text is escaped by the template."""
    from markupsafe import Markup

    return _template().render(
        document=document,
        pictures={name: Markup(svg) for name, svg in pictures.items()},  # which escape what they show
        colours=colours(document.names, document.original or None),
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)
