"""Tools: functions that a model may call. How its template has it write calls, and how calls are found in its text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pronk.errors import short
from pronk.serve.failures import ApiError

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_MOST = 128  # tools of a request


@dataclass(frozen=True)
class Toolset:
    """The tools of a request, in OpenAI's form. `parallel`: whether several may be called at once."""

    tools: tuple[Mapping[str, Any], ...]
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


def toolset(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    source: str,
) -> Toolset | None:
    """Of a request, in OpenAI's form; None where the model is to know of none. `source`: the chat template.

    Raises ApiError for tools that are none, and where the template has no place for them.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice is for tools, of which there are none", "tool_choice")
        return None
    if len(tools) > _MOST:
        raise ApiError(400, f"{len(tools)} tools are more than {_MOST}", "tools")
    checked = tuple(_checked(number, tool) for number, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ApiError(400, f"two tools are called {twice[0]!r}", "tools")
    if choice == "none":
        return None
    if choice == "required" or isinstance(choice, Mapping):
        raise ApiError(400, "tool_choice can be auto or none; no call can be forced yet", "tool_choice")
    if choice not in (None, "auto"):
        raise ApiError(400, f"tool_choice is auto, none, required or names a tool; not {short(choice)}", "tool_choice")
    if "tools" not in source:
        raise ApiError(400, "this model's chat template has no place for tools; choose a model made for them", "tools")
    return Toolset(checked, parallel is not False)


def _checked(number: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise ApiError(400, f'tool {number} must be {{"type": "function", "function": ...}}', "tools")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,64}", name):
        raise ApiError(400, f"tool {number} must have a name of letters, digits, _ and -, not {short(name)}", "tools")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise ApiError(400, f"the parameters of {name} must be a JSON schema", "tools")
    return {"type": "function", "function": dict(function)}


@dataclass(frozen=True)
class Call:
    """A call, or what comes of one: `name` and `id` in its first piece alone."""

    index: int
    arguments: str  # JSON, or a part of it
    name: str | None = None
    id: str | None = None


def new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass
class CallFinder:
    """Finds the calls in one text as it comes. What is no call stays text.

    A call is given when it is whole, for a model can err to its last bracket.
    """

    tools: Toolset
    calls: int = 0
    _held: str = ""
    _text: bool = False  # whether there was anything but calls and spaces
    _done: bool = False  # one call is all that was wanted

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
        if self.calls and body.startswith(_CLOSES):
            self._held = body[len(_CLOSES) :]
            return True
        opener = next((sign for sign in (_OPENS, "[TOOL_CALLS]") if body.startswith(sign)), "")
        rest = body[len(opener) :].lstrip()
        if opener or (not self._text and rest[:1] in ("{", "[")):
            return self._call(rest, found, last, len(opener) > 0)
        if not last and (not body or any(sign.startswith(body) for sign in (_OPENS, "[TOOL_CALLS]", _CLOSES))):
            return False
        at = self._held.find(_OPENS, 1)
        end = at if at > 0 else len(self._held) - _overlap(self._held, _OPENS) * (not last)
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
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            if not last and _may_go_on(rest):
                return False
            return self._as_text(found, len(self._held) if not opened else len(_OPENS))
        calls = [_of(one, self.tools.names) for one in (value if isinstance(value, list) else [value])]
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
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, Mapping) else None


def _may_go_on(text: str) -> bool:
    """Whether what is no JSON yet lacks its end only, so far as brackets tell."""
    scan = _Brackets()
    return scan.feed(text) == len(text) and not scan.closed


def _overlap(text: str, sign: str) -> int:
    return next((n for n in range(min(len(text), len(sign) - 1), 0, -1) if text.endswith(sign[:n])), 0)
