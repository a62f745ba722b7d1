"""Calls: of tools, found in a model's text as it comes."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pronk.serve.tools import CLOSES, OPENS, TOKEN, Toolset

_SIGNS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Call:
    """A call, or what comes of one: `name` and `id` in its first piece alone."""

    index: int
    arguments: str  # JSON, or a part of it
    name: str | None = None
    id: str | None = None


def new_id() -> str:
    """Nine letters and digits, for Mistral's templates take no other when a call comes back in a conversation."""
    return "".join(secrets.choice(_SIGNS) for _ in range(9))


@dataclass
class CallFinder:
    """Finds the calls in one text as it comes. What is no call stays text.

    A call is given when it is whole, for a model can err to its last bracket.
    """

    tools: Toolset
    calls: int = 0
    _held: str = ""
    _brackets: _Brackets | None = None  # of what may become a call, as far as `_seen` characters of it
    _seen: int = 0
    _text: bool = False  # whether there was anything but calls and spaces
    _done: bool = False  # one call is all that was wanted

    @property
    def whole(self) -> bool:
        """Whether there are calls."""
        return self.calls > 0

    def feed(self, text: str, last: bool) -> list[str | Call]:
        """What is certain now: texts, and calls. `last`: nothing follows."""
        self._held += text
        found: list[str | Call] = []
        while self._held and not self._done and self._step(found, last):
            pass
        if self._done:
            self._held = ""
        elif last and self._held:
            found.append(self._held)
            self._held = ""
        return found

    def _step(self, found: list[str | Call], last: bool) -> bool:
        """One part of what is held, if it is certain which: whether there was one."""
        body = self._held.lstrip(" \n\r\t;," if self.calls else " \n\r\t")
        if self.calls and body.startswith(CLOSES):
            self._held = body[len(CLOSES) :]
            return True
        opener = next((sign for sign in (OPENS, TOKEN) if body.startswith(sign)), "")
        if not opener and not last and any(sign.startswith(body) for sign in (OPENS, TOKEN, CLOSES)):
            return False
        rest = body[len(opener) :].lstrip()
        if opener or (not self._text and rest[:1] in ("{", "[")):
            return self._call(rest, found, last, len(opener) > 0)
        at = self._held.find(OPENS, 1)
        end = at if at > 0 else len(self._held) - _overlap(self._held, OPENS) * (not last)
        if at > 0 or not last:  # spaces before a call are no part of the text
            end = len(self._held[:end].rstrip())
        if end <= 0:
            return False
        self._text = True
        found.append(self._held[:end])
        self._held = self._held[end:]
        return at > 0

    def _call(self, rest: str, found: list[str | Call], last: bool, opened: bool) -> bool:
        if not rest:
            return False
        if self._brackets is None:
            self._brackets, self._seen = _Brackets(), 0
        self._brackets.feed(rest[self._seen :])
        self._seen = len(rest)
        if not last and not self._brackets.closed:
            return False
        self._brackets = None
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return self._as_text(found, len(self._held) if not opened else len(OPENS))
        calls = [_of(one, self.tools.allowed) for one in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:
            return self._as_text(found, len(self._held) - len(rest) + end)
        for one in calls[: None if self.tools.parallel else 1]:
            assert one
            found.append(Call(self.calls, "", one[0], new_id()))
            found.append(Call(self.calls, one[1]))
            self.calls += 1
        self._held = rest[end:]
        self._done = not self.tools.parallel
        return True

    def _as_text(self, found: list[str | Call], end: int) -> bool:
        self._text = True
        found.append(self._held[:end])
        self._held = self._held[end:]
        return bool(self._held)


# What stands before the arguments of a call that a grammar holds to its form, and between two calls.
_HEAD = re.compile(r'\A[^{]*\{"name": "([\w-]+)", "\w+": ')


@dataclass
class ForcedCalls:
    """Reads a text that a grammar holds to calls in their dialect's form: arguments are given as they come."""

    tools: Toolset
    calls: int = 0
    _held: str = ""  # what belongs to no arguments yet
    _arguments: _Brackets | None = None  # of the call that is under way

    @property
    def whole(self) -> bool:
        """Whether there are calls, and the last is whole."""
        return self.calls > 0 and self._arguments is None

    def feed(self, text: str, last: bool) -> list[str | Call]:
        """Pieces of calls. Of a text that is cut off in the form around a call, that form is no piece of anything."""
        found: list[str | Call] = []
        while text or self._held:
            if self._arguments is None:
                self._held += text
                head = _HEAD.match(self._held)
                if not head:
                    break
                found.append(Call(self.calls, "", head[1], new_id()))
                text, self._held, self._arguments = self._held[head.end() :], "", _Brackets()
                self.calls += 1
            elif text:
                size = self._arguments.feed(text)
                found.append(Call(self.calls - 1, text[:size]))
                text = text[size:]
                if self._arguments.closed:
                    self._arguments = None
            else:
                break
        return found


class _Brackets:
    """Where a JSON object or list ends, so far as brackets tell."""

    def __init__(self) -> None:
        self.closed, self._depth, self._in_text, self._escaped = False, 0, False, False

    def feed(self, text: str) -> int:
        """How many characters belong to it."""
        for at, sign in enumerate(text):
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == '"':
                    self._in_text = False
            elif sign == '"':
                self._in_text = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if not self._depth:
                    self.closed = True
                    return at + 1
        return len(text)


def _of(value: object, names: Sequence[str]) -> tuple[str, str] | None:
    """Name and arguments of a call as models write it."""
    if not isinstance(value, Mapping) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return None
    try:
        spelled = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        spelled.encode()
    except (ValueError, RecursionError):  # NaN, infinity, half of a character: no client can read them
        return None
    return value["name"], spelled


def _overlap(text: str, sign: str) -> int:
    return next((n for n in range(min(len(text), len(sign) - 1), 0, -1) if text.endswith(sign[:n])), 0)
