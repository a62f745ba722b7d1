"""What the process does in which chat templates run: it answers a line of JSON with a line of JSON.

renderer.py has it started. Jinja's immutable sandbox keeps a template away from Python; the system keeps the process
within its time and memory. Nothing here imports pronk: to start it is to import Jinja.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

# Attributes are given of these alone, and never those with formats, which reach for attributes of their own.
_OPEN = (str, list, tuple, dict, Undefined, LoopContext, Macro, Namespace, Cycler, Joiner)
_CLOSED = ("encode", "format", "format_map")
_NO_FILTERS = ("attr", "format", "random")
_GLOBALS = ("range", "dict", "cycler", "joiner", "namespace")
_WORTH_KEEPING = 0.1  # seconds of work: more may leave a large heap, and a new process costs half of that


class _GenerationTag(Extension):
    """{% generation %}: marks the answers in templates made for training; what it encloses is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What a template finds: as in transformers, less what could reach out of the sandbox or differs by chance."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters = {name: f for name, f in self.filters.items() if name not in _NO_FILTERS} | {"tojson": _tojson}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return isinstance(obj, _OPEN) and attr not in _CLOSED and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would let `str.format` through; `is_safe_attribute` refuses it."""


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape <, > and &, which models were not trained on."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise SecurityError("tojson takes an indent from 0 to 16")
    if any(len(s) > 16 for s in separators or ()):
        raise SecurityError("tojson takes short separators")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> None:
    raise TemplateError(str(message)[:400])


def _strftime_now(form: str) -> str:
    if not isinstance(form, str) or len(form) > 64 or re.search(r"%\W*\d", form):
        raise SecurityError("strftime_now takes a short format without widths")
    return datetime.now().strftime(form)


_environment = ChatEnvironment()
_compiled = lru_cache(16)(_environment.from_string)


def _compile(source: str) -> Template | dict[str, Any]:
    """The template, or what is wrong with it."""
    try:
        return _compiled(source)
    except TemplateSyntaxError as error:
        return {"broken": _one_line(error), "line": error.lineno}
    except Exception as error:  # Python's compiler has limits of its own: nesting (a MemoryError), recursion
        return {"broken": f"cannot be compiled: {_one_line(error)}"}


def _render(template: Template, given: Mapping[str, Any], most: int) -> dict[str, Any]:
    """`broken`: the template is at fault; `refused`: what it was given."""
    parts, size = [], 0
    try:
        for part in template.root_render_func(template.new_context(dict(given))):
            parts.append(part)
            size += len(part)
            if size > most:
                return {"broken": f"the template writes more than its size budget of {most} characters"}
        return {"text": "".join(parts)}
    except MemoryError:
        raise
    except RecursionError:
        return {"broken": "the template calls itself without end, or builds a value that is nested too deeply"}
    except SecurityError as error:
        return {"broken": f"the template does what none may: {_one_line(error)}"}
    except TemplateError as error:
        return {"refused": _one_line(error)}
    except Exception as error:  # whatever an expression of the template can raise
        return {"refused": f"{type(error).__name__}: {_one_line(error)}"}


def _one_line(error: BaseException) -> str:
    """Messages may quote the template, or be its own words: of any length, over any number of lines."""
    text = " ".join(str(error)[:2000].split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "…"


def answer(line: bytes) -> bytes:
    begun = time.process_time()
    try:
        source, given = json.loads(line.decode("utf-8", "surrogatepass"))
    except RecursionError:
        return json.dumps({"refused": "the messages are nested too deeply"}).encode() + b"\n"
    made = _compile(source)
    if isinstance(made, Template):
        made = {} if given is None else _render(made, given, (8 << 20) + 16 * len(line))
    if time.process_time() - begun > _WORTH_KEEPING:
        made["spent"] = True
    return json.dumps(made, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
