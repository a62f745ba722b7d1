"""A Document as one HTML file: styles and pictures inside, no scripts, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from pronk.measure.plot_style import colours
from pronk.measure.report.document import Document


def page(document: Document, pictures: Mapping[str, str], note: str) -> str:
    """`pictures`: <svg> elements by name. All other text is escaped by the template."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        document=document,
        note=note,
        pictures={name: Markup(svg) for name, svg in pictures.items()},  # matplotlib escapes what it writes
        colours=colours(document.names, document.original or None),
    )
