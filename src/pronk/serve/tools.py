"""Tools: functions that a model may call, how its template has it write calls, and the grammar of these."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pronk.errors import BadRequest, short
from pronk.grammar import bounds
from pronk.grammar.structure import Structure
from pronk.serve.failures import ApiError

OPENS, CLOSES, TOKEN = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
_MOST = 128  # tools of a request
_PLACE = re.compile(r".*? at (\d+)\(\d+\): (failed to compile JSON schema: )?")  # in a grammar: line and column


@dataclass(frozen=True)
class Dialect:
    """How a model writes calls. `token`: a special token before them, which no text can spell."""

    begin: str
    between: str | None  # None: one call alone
    end: str
    arguments: str = "arguments"
    token: str = ""


HERMES = Dialect(f"{OPENS}\n", f"\n{CLOSES}\n{OPENS}\n", f"\n{CLOSES}")
MISTRAL = Dialect("[", ", ", "]", token=TOKEN)
LLAMA3 = Dialect("", None, "", "parameters")


def dialect(source: str) -> Dialect:
    """Of a chat template. Hermes' where none can be told: models know it best."""
    if TOKEN in source:
        return MISTRAL
    return LLAMA3 if OPENS not in source and '"parameters"' in source else HERMES


@dataclass(frozen=True)
class Toolset:
    """The tools of a request, in OpenAI's form. `parallel`: whether several may be called at once. `allowed`: names
    of those that may be called. `forced`: whether the text must be calls."""

    tools: tuple[Mapping[str, Any], ...]
    allowed: tuple[str, ...]
    parallel: bool = True
    forced: bool = False
    dialect: Dialect = HERMES

    def structure(self, form: Structure | None) -> Structure | None:
        """What the text must follow; None where it is free. `form`: of a text that is no call. Raises ApiError."""
        if not self.forced and form is None:
            return None
        if form and form.kind != "json_schema":
            raise ApiError(400, "beside tools a text can be held to a JSON schema, and to no other form", "tools")
        between, spelled = self.dialect.between, json.dumps
        more = f" ({spelled(between)} call)*" if between and self.parallel else ""
        rules = [f"calls: {_quoted(self.dialect.begin)} call{more} {_quoted(self.dialect.end)}"]
        rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(self.allowed))))
        for n, name in enumerate(self.allowed):
            start = f'{{"name": "{name}", "{self.dialect.arguments}": '
            rules.append(f'call_{n}: {spelled(start)} arguments_{n} "}}"')
            rules.append(f"arguments_{n}: %json {_with_our_spaces(self._schema(name))}")
        if form and not self.forced:
            rules.append(f"form: %json {_with_our_spaces(json.loads(form.source))}")
        return Structure.grammar("\n".join([f"start: calls{' | form' * (not self.forced)}", *rules]))

    def told(self, problem: str) -> str:
        """What is wrong with the structure, by the tool's name in place of a line of a grammar that nobody wrote."""
        place = _PLACE.match(problem)
        n = (int(place[1]) - 4) // 2 if place else -1  # two lines a tool, behind three
        if not place or not 0 <= n < len(self.allowed):
            return problem
        return f"the parameters of {self.allowed[n]} cannot be followed: {problem[place.end() :]}"

    def _schema(self, name: str) -> dict[str, Any]:
        """Of a tool's arguments. Raises ApiError where it is none that can be followed."""
        function = next(tool["function"] for tool in self.tools if tool["function"]["name"] == name)
        given = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        if given.get("type", "object") != "object":
            raise ApiError(400, f"the parameters of {name} must be of type object", "tools")
        schema = {"type": "object", **given}
        try:
            bounds.check(Structure.json_schema(schema))
        except BadRequest as error:
            raise ApiError(400, f"the parameters of {name}: {error}", "tools") from None
        return schema


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _with_our_spaces(schema: Mapping[str, Any]) -> str:
    from pronk.grammar import guidance  # imports llguidance

    return json.dumps({**schema, "x-guidance": guidance.JSON}, ensure_ascii=False)


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
    check_count(tools)
    checked = tuple(_checked(number, tool) for number, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ApiError(400, f"two tools are called {twice[0]!r}", "tools")
    if choice == "none":
        return None
    allowed, forced, single = _chosen(choice, names)
    if "tools" not in source:
        problem = "this model's chat template has no place for tools; send none, or choose a model made for them"
        raise ApiError(400, problem, "tools")
    return Toolset(checked, allowed, parallel is not False and not single, forced, dialect(source))


def check_count(tools: Sequence[object]) -> None:
    """Raises ApiError."""
    if len(tools) > _MOST:
        raise ApiError(400, f"{len(tools)} tools are more than {_MOST}", "tools")


def _chosen(choice: str | Mapping[str, Any] | None, names: Sequence[str]) -> tuple[tuple[str, ...], bool, bool]:
    """Names that may be called, whether one must be, and whether it is one alone. Raises ApiError."""
    wanted: Sequence[Any] = names
    forced, single = choice == "required", False
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        given = choice.get("allowed_tools")
        given = given if isinstance(given, Mapping) else choice
        mode, listed = given.get("mode", "auto"), given.get("tools")
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise ApiError(400, "allowed_tools has a mode, auto or required, and a list of tools", "tool_choice")
        forced, wanted = mode == "required", [_named(tool) for tool in listed]
    elif isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        forced, single, wanted = True, True, [_named(choice)]
    elif choice not in (None, "auto", "required"):
        raise ApiError(400, f"tool_choice is auto, none, required or names a tool; not {short(choice)}", "tool_choice")
    for name in wanted:
        if name not in names:
            raise ApiError(400, f"tool_choice names {short(name)}, which is none of the tools", "tool_choice")
    return tuple(dict.fromkeys(wanted)), forced, single


def _named(tool: object) -> object:
    """By the chat's form, or the flat one of the Responses API."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _checked(number: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise ApiError(400, f'tool {number} must be {{"type": "function", "function": ...}}', "tools")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,64}", name):
        raise ApiError(
            400, f"tool {number} must have a name of 1 to 64 letters, digits, _ and -, not {short(name)}", "tools"
        )
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise ApiError(400, f"the parameters of {name} must be a JSON schema", "tools")
    return {"type": "function", "function": dict(function)}
