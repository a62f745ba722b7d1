"""Templates filled in. What they are given is text and never markup: Markdown has it escaped, as code or fenced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pronk.measure.formatting import listed, plain

if TYPE_CHECKING:
    from jinja2 import Environment


def filled(template: str, said: Mapping[str, Any]) -> str:
    """A page of Markdown, if its name says so, else of HTML."""
    return _environment(markdown=".md." in template).get_template(template).render(said)


@cache
def _environment(*, markdown: bool) -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def marked(value: Any) -> Any:
        return value if hasattr(value, "__html__") else Markup(escaped(str(value)))

    found = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        extensions=["jinja2.ext.do"], finalize=marked if markdown else None,
        loader=FunctionLoader(lambda name: files(__package__).joinpath(name).read_text(encoding="utf-8")),
    )  # fmt: skip
    found.filters |= {"plain": plain, "listed": listed, "id": _id}
    found.filters |= {"code": lambda text: Markup(code(text)), "fenced": lambda text: Markup(fenced(text))}
    return found


def _id(title: str) -> str:
    return "-".join(re.findall(r"\w+", title.lower()))


def escaped(text: str) -> str:
    """As Markdown that shows `text` itself, in one line."""
    text = re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(text: str) -> str:
    """A span of code in a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    ticks = "`" * (1 + _longest(text))
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"


def fenced(text: str) -> str:
    """A block of code that nothing in `text` can end."""
    ticks = "`" * max(3, 1 + _longest(text))
    return f"{ticks}text\n{text.strip(chr(10))}\n{ticks}"


def _longest(text: str) -> int:
    """Run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
