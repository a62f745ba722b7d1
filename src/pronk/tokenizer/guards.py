"""What a filter, a test or a method of a text will cost, reckoned before it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError

from pronk.tokenizer.budget import CONTAINERS, OverBudget, current

_LAZY = ("map", "reject", "rejectattr", "select", "selectattr")
_COPIES = ("string", "trim", "upper", "lower", "title", "capitalize", "escape", "e", "safe", "int", "float")
_LISTING = ("list", "sort", "join", "unique")  # which take a text for its characters
_BACKWARDS = ("rfind", "rindex", "rpartition", "rsplit")  # which Python does in quadratic time
SPLITS = ("split", "rsplit", "splitlines")
_WHITE_SPACE = [chr(c) for c in range(0x3001) if chr(c).isspace()]
_SMALL_TEXT = 64  # bytes that Python takes for one, and for its place in a list
_STRIPS = ("strip", "lstrip", "rstrip")


def check_search(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Refuse the searches that would take far longer than their operands are long."""
    size = max((len(arg) for arg in args if isinstance(arg, str)), default=0)
    if name in _BACKWARDS and size * len(text) > 1 << 24:
        raise OverBudget(f"searches too long a text with {name}")
    if name in _STRIPS and size > 64:
        raise OverBudget(f"takes too many characters in {name}")


def measure(name: str, text: str, args: tuple[Any, ...]) -> None:
    """What is short to write and may be long to run, or make many small texts."""
    budget = current.get()
    if name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        budget.reserve(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], CONTAINERS):
        budget.reserve(budget.weigh(args[0])[1] + len(text) * len(args[0]))
    elif name in SPLITS:
        separator = next((arg for arg in args if isinstance(arg, str)), "")
        parts = text.count(separator) if separator else sum(map(text.count, _WHITE_SPACE))
        budget.reserve(len(text) + _SMALL_TEXT * parts)


def stepping(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def step(*args: Any, **kwargs: Any) -> Any:
        current.get().step(1)
        return test(*args, **kwargs)

    return step


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that reports what it makes. `wraps` carries Jinja's mark of what to pass it over."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.step(1)
        value: Any = args[first] if len(args) > first else None
        rest = (*args[first + 1 :], *kwargs.values())
        if name not in _LAZY and first < len(args):
            value = budget.gather(value)
            args = (*args[:first], value, *args[first + 1 :])
        if name in _LISTING and isinstance(value, str):
            budget.reserve((8 if value.isascii() else 80) * len(value))
        if name in _COPIES:
            budget.reserve(budget.weigh(value)[1])
        if name == "trim":
            check_search("strip", "", rest)
        elif name == "replace":
            args = (*args[:first], budget.text(value), *args[first + 1 :])
            measure(name, args[first], tuple(map(budget.text, rest[:2])))
        elif name == "join":
            count = len(value)
            budget.reserve(budget.weigh(value)[1] + count * max(map(len, map(budget.text, rest)), default=0))
        elif name == "indent":
            if any(len(w) > 64 if isinstance(w, str) else not 0 <= w <= 64 for w in rest):
                raise SecurityError("indent takes widths up to 64")
            budget.reserve(len(value) + 64 * value.count("\n"))
        elif name == "round" and any(isinstance(p, int) and abs(p) > 15 for p in rest):
            raise SecurityError("round takes up to 15 digits")
        elif name == "sum" and not all(isinstance(start, int | float | str) for start in rest):
            raise SecurityError("sum adds numbers only")
        return budget.charge(function(*args, **kwargs))

    return guard
