"""Jinja2's immutable sandbox with a budget: a hostile template ends in an error, soon and in little memory.

Jinja's own sandbox keeps a template away from Python, not from the processor. Here everything that can loop or create a
value reports to the render's Budget. Templates are rewritten after parsing so that `~`, slices, literals and each turn
of a loop report too; nothing is folded while compiling; and operations whose result may be far larger than their
arguments are measured before they run, or not offered at all.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from pronk.tokenizer.budget import INTEGER_BITS, Budget, OverBudget, current
from pronk.tokenizer.guards import SPLITS, check_search, guarded, measure, stepping
from pronk.tokenizer.instrument import instrument

TEMPLATE_CHARACTERS = 48 << 10  # published templates have less than 40 KB

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        """capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric
        isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition
        rsplit rstrip split splitlines startswith strip swapcase title upper""".split()
    ),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
}
_OF_JINJA = (Undefined, LoopContext, Macro, Namespace, Cycler, Joiner)

# Those whose result is about as large as their argument, and those that `guarded` measures.
_FILTERS = """abs capitalize count d default dictsort e escape first float groupby indent int items join last length
list lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title tojson trim
unique upper""".split()
_GLOBALS = ("range", "dict", "cycler", "joiner", "namespace")
_WIDTH = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*[\d*]")


def _charge(value: Any) -> Any:
    return current.get().charge(value)


def _concat(parts: Iterable[Any]) -> str:
    """Jinja's way of joining what a macro or a block wrote."""
    budget, texts = current.get(), []
    size = 0
    for part in parts:
        texts.append(part)
        size += len(part)
        budget.reserve(size)
    joined: str = budget.charge("".join(texts))
    return joined


class _GenerationTag(Extension):
    """{% generation %}: marks the answers in templates made for training; what it encloses is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        # A `finalize` that wants the context keeps the compiler from evaluating constants, which no budget would pay.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            optimized=False,
            finalize=_finalize,
        )
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters = {name: guarded(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = guarded("tojson", _tojson)
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: stepping(test) for name, test in tests.items()}

    def compile_budgeted(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """The function that renders `source`. Raises TemplateError, OverBudget, or whatever Python's compiler does."""
        if len(source) > TEMPLATE_CHARACTERS:
            raise OverBudget(f"is longer than {TEMPLATE_CHARACTERS} characters")
        tree = instrument(self.parse(source), self)
        template = self.template_class.from_code(self, self.compile(tree), dict(self.globals))

        def render(variables: Mapping[str, Any]) -> str:
            token = current.set(Budget(variables))
            try:
                return _concat(template.root_render_func(template.new_context(dict(variables))))
            finally:
                current.reset(token)

        return render

    # -- what the rewritten template calls --

    def spend(self, cost: int) -> str:
        return current.get().step(cost)

    def made(self, value: Any) -> Any:
        return _charge(value)

    def seen(self, value: Any) -> Any:
        current.get().step(1)
        return value

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return _charge(value[start:stop:step])

    def joined(self, parts: list[Any]) -> str:
        budget = current.get()
        return _concat([budget.text(part) for part in parts])

    # -- what Jinja's compiled code calls --

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if getattr(__obj, "__self__", None) is __self:
            return __obj(*args)
        budget = current.get()
        budget.step(1)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in ("replace", "join"):
            args = (*map(budget.gather, args),)
            measure(name, owner, args)
        elif isinstance(owner, str) and name in SPLITS:
            measure(name, owner, (*args, *kwargs.values()))
        if isinstance(owner, str):
            check_search(name, owner, args)
        return budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int) and times > 0:
                    current.get().reserve(sys.getsizeof(sequence) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > INTEGER_BITS:
                raise OverBudget("computes with numbers that are too large")
        elif operator == "%" and isinstance(left, str):
            if _WIDTH.search(left):
                raise SecurityError("widths in % formatting are not allowed")
            current.get().reserve(4 * (len(left) + left.count("%") * current.get().weigh(right)[1]))
        return _charge(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        current.get().step(1)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        current.get().step(1)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, _OF_JINJA) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would let `str.format` through, whose widths have no bound; `is_safe_attribute` refuses it."""


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Every value that a template writes passes here."""
    return value if isinstance(value, Undefined) else _charge(current.get().text(value))


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
    count, characters = current.get().weigh(value)
    depth = _depth(value) if indent else 1
    current.get().reserve(6 * characters + count * (16 + (indent or 0) * depth))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return 1 + max(map(_depth, children), default=0)


def _raise_exception(message: object = "") -> None:
    raise TemplateError(current.get().text(message)[:400])


def _strftime_now(form: str) -> str:
    if not isinstance(form, str) or len(form) > 64 or re.search(r"%\W*\d", form):
        raise SecurityError("strftime_now takes a short format without widths")
    return datetime.now().strftime(form)
