"""Shapes: what an object read from JSON is to be like, and within which bounds. `problems` says where one differs.

Written as Python values: bool; int, from 0; a Number; str, or a Text, which may be longer; a tuple of the words that
there are; a list of what a list holds and, after it, of how many at most; a dict of what an object has, which may have
more; Named, whose keys are names. Maybe: absent or null as well. Either: one shape or another, by a key. Rule: what
must hold between fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pronk.errors import short

_MANY = 100_000  # of what has no bound of its own
_MOST, _LEAST = 1e15, 1e-100  # of numbers, and of those but zero: their ratios are finite, and axes have room for them


class Number(NamedTuple):
    least: float = -_MOST
    most: float = _MOST


class Text(NamedTuple):
    most: int = 10_000  # characters of a name, a path or a command


class Maybe(NamedTuple):
    shape: Any


class Named(NamedTuple):
    """An object whose keys are names, of variants, say; `shape` None: of anything."""

    shape: Any = None
    most: int = _MANY


class Rule(NamedTuple):
    """What must hold of that which is as `shape` has it; `breach` says what it is where it does not."""

    shape: Any
    holds: Callable[[Any], bool]
    breach: str


class Either(NamedTuple):
    """An object as `shape` has it where it has this key, else as `otherwise` has it."""

    key: str
    shape: Any
    otherwise: Any


def problems(given: Any, shape: Any, where: str) -> Iterator[str]:
    """Every place where `given`, which is called `where`, is not as `shape` has it, in words."""
    match shape:
        case Maybe(inner):
            if given is not None:
                yield from problems(given, inner, where)
        case Rule(inner, holds, breach):
            found = list(problems(given, inner, where))
            yield from found or ([] if holds(given) else [f"{where} is {breach}"])
        case list():
            most = shape[1] if shape[1:] else _MANY
            if not isinstance(given, list):
                yield f"{where} is {_kind(given)} and no list"
            elif len(given) > most:
                yield f"{where} has {len(given)} entries, and {most} at most are drawn"
            else:
                for n, value in enumerate(given):
                    yield from problems(value, shape[0], f"{where}[{n}]")
        case dict() | Named() | Either() if not isinstance(given, dict):
            yield f"{where} is {_kind(given)} and no object"
        case dict():
            for name, inner in shape.items():
                if name in given or not isinstance(inner, Maybe):
                    yield from problems(given.get(name), inner, f"{where}.{name}")
        case Either(key, first, otherwise):
            yield from problems(given, first if key in given else otherwise, where)
        case Named(_, most) if len(given) > most:
            yield f"{where} has {len(given)} names, and {most} at most are drawn"
        case Named(inner):
            for name, value in given.items():
                yield from _leaf(name, str, f"a name in {where}")
                if inner is not None:
                    yield from problems(value, inner, f"{where}[{name!r}]")
        case _:
            yield from _leaf(given, shape, where)


def _leaf(given: Any, shape: Any, where: str) -> Iterator[str]:
    words = isinstance(shape, tuple) and not isinstance(shape, Number | Text)
    kinds: Any = (int, float) if isinstance(shape, Number) else str if words or isinstance(shape, Text) else shape
    if not isinstance(given, kinds) or (isinstance(given, bool) and shape is not bool):
        yield f"{where} is {_kind(given)}"
    elif words:
        if given not in shape:
            yield f"{where} is {short(given)} and none of {', '.join(shape)}"
    elif isinstance(given, str):
        if len(given) > (most := (shape if isinstance(shape, Text) else Text()).most):
            yield f"{where} has {len(given)} characters, more than {most}"
    elif shape is not bool:
        bounds = Number(least=0) if shape is int else shape
        if not bounds.least <= given <= bounds.most or 0 < abs(given) < _LEAST:
            yield f"{where} is {short(given)}, which is out of range"


def _kind(value: Any) -> str:
    return "null or absent" if value is None else f"a {type(value).__name__}"
