"""PEFT's patterns of module names: the keys of rank_pattern and alpha_pattern, of which the first that matches counts.

A key is a regular expression, from a file that nobody vouches for, and Python's matcher takes exponential time over
some. It runs those alone that cannot cost much: names, and of the rest characters, classes, and three repeats of one
character or groups of names, in all. Over a module's name of some 50 characters that is a polynomial of third degree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pronk.errors import BadFile, Unsupported, short

_NAME = re.compile(r"[A-Za-z0-9_.-]*")  # its dots match any character, as in PEFT
_CHARACTER = r"(?:[A-Za-z0-9_.-]|\\[.d]|\[\^?[A-Za-z0-9_-]+\])"
_HARMLESS = re.compile(rf"\^?(?:{_CHARACTER}[*+?]?|\((?:\?:)?[A-Za-z0-9_.|-]+\)(?![*+?])|\|)*\$?")
_REPEAT = re.compile(r"(?<!\()[*+?]")  # "(?:" repeats nothing
_MOST_REPEATS, _MOST_ALTERNATIVES, _MOST_EXPRESSIONS, _MOST, _LONGEST = 3, 16, 32, 1024, 256


class Patterns:
    """Numbers by pattern, in the file's order."""

    def __init__(self, path: Path, field: str, numbers: Mapping[str, float]) -> None:
        """Raises BadFile, and Unsupported for an expression that might run for long."""
        if len(numbers) > _MOST:
            raise BadFile(path, f"has {len(numbers)} patterns, more than the {_MOST} allowed", field=field)
        expressions = [key for key in numbers if not _NAME.fullmatch(key)]
        for key in expressions:
            choices = len(_REPEAT.findall(key)) + key.count("(")
            costly = choices > _MOST_REPEATS or key.count("|") > _MOST_ALTERNATIVES
            if len(key) > _LONGEST or not _HARMLESS.fullmatch(key) or costly:
                raise Unsupported(
                    f"{path}: {field}: the pattern {short(key)} is not supported; names are, and expressions of "
                    f"characters, classes, and up to {_MOST_REPEATS} repeats or groups of names"
                )
        if len(expressions) > _MOST_EXPRESSIONS:
            problem = f"{len(expressions)} patterns that are no names are not supported; {_MOST_EXPRESSIONS} are"
            raise Unsupported(f"{path}: {field}: {problem}")
        try:
            self._numbers = [(re.compile(rf"(.*\.)?({key})$"), number) for key, number in numbers.items()]
        except re.error as error:  # a class as [z-a]
            raise BadFile(path, f"is no regular expression: {error}", field=field) from None

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def of(self, module: str, otherwise: float) -> float:
        return next((number for pattern, number in self._numbers if pattern.match(module)), otherwise)
