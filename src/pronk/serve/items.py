"""Items: what a request of the Responses API holds, made into a chat's messages, tools and form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pronk.errors import short
from pronk.serve.failures import ApiError
from pronk.serve.requests import ResponsesRequest
from pronk.serve.tools import check_count

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")
# Of OpenAI's own tools and models: there is none of it here, and so nothing to include.
_NOTHING_TO_INCLUDE = {
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
}  # fmt: skip
_TOOL = ("type", "name", "description", "parameters", "strict")


def messages(request: ResponsesRequest, notes: list[str]) -> list[dict[str, Any]]:
    """`notes`: where what changes nothing is added, a sentence each. Raises ApiError."""
    found: list[dict[str, Any]] = []
    if request.instructions is not None:
        found.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*found, {"role": "user", "content": request.input}]
    if not request.input:
        raise ApiError(400, "input is empty", "input")
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    for number, item in enumerate(request.input):
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                known = ", ".join(_ROLES)
                raise ApiError(400, f"item {number} of input has the role {short(role)}, not one of {known}", "input")
            found.append({"role": role, "content": _content(number, item.get("content"))})
        elif kind == "function_call":
            name, id = (_text(number, item, field) for field in ("name", "call_id"))
            names[id] = name
            function = {"name": name, "arguments": _text(number, item, "arguments")}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
        elif kind == "function_call_output":
            id = _text(number, item, "call_id")
            content = _content(number, item.get("output"))
            found.append({"role": "tool", "tool_call_id": id, "content": content, "name": names.get(id)})
        elif kind == "reasoning":
            notes.append(f"item {number} of input is reasoning, which no template has a place for; it was left out")
        elif kind == "item_reference":
            raise ApiError(400, f"item {number} of input refers to one kept before; nothing is kept here", "input")
        else:
            raise ApiError(400, f"item {number} of input has the type {short(kind)}, which cannot be had", "input")
    return found


def _content(number: int, content: object) -> object:
    """As a chat has it: a text, or parts of text. Raises ApiError."""
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise ApiError(400, f"item {number} of input has no content: a text, or a list of parts", "input")
        return content
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*_TEXTS, "refusal"):
            raise ApiError(400, f"item {number} of input has a part of type {short(kind)}; only text is read", "input")
        if not isinstance(text, str):
            raise ApiError(400, f"item {number} of input has a part without text", "input")
        found.append({"type": "text", "text": text})
    return found


def _text(number: int, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise ApiError(400, f"item {number} of input must have a text for {field}, not {short(value)}", "input")
    return value


def tools(request: ResponsesRequest, notes: list[str]) -> list[dict[str, Any]] | None:
    """The functions that may be called, in the chat's form. Raises ApiError."""
    found = []
    check_count(request.tools or ())
    allowed = _allowed(request.tool_choice)
    names = [tool.get("name") for tool in request.tools or []]
    for name in allowed or ():
        if name not in names:
            raise ApiError(400, f"tool_choice names {short(name)}, which is none of the tools", "tool_choice")
    for tool in request.tools or []:
        if tool.get("type") != "function":
            problem = f"tools of type {short(tool.get('type'))} cannot be had; this server calls functions of yours"
            raise ApiError(400, problem, "tools")
        notes += [f"{name} of a tool changed nothing" for name in sorted(tool.keys() - set(_TOOL)) if tool[name]]
        if allowed is None or tool.get("name") in allowed:
            function = {name: tool[name] for name in _TOOL[1:] if tool.get(name) is not None}
            found.append({"type": "function", "function": function})
    return found or None


def _allowed(choice: str | Mapping[str, Any] | None) -> list[Any] | None:
    """Names of the tools that a choice leaves."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    given = choice.get("tools")
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise ApiError(400, "tool_choice of type allowed_tools has a list of tools", "tool_choice")
    return [tool.get("name") for tool in given if tool.get("type") == "function"]


def tool_choice(request: ResponsesRequest) -> str | dict[str, Any] | None:
    """In the chat's form. Raises ApiError."""
    choice = request.tool_choice
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        return str(choice["mode"])
    raise ApiError(400, f"tool_choice {short(choice)} cannot be had", "tool_choice")


def form(request: ResponsesRequest, notes: list[str]) -> dict[str, Any] | None:
    """The chat's response_format. Raises ApiError."""
    text = request.text or {}
    notes += [f"text.{name} changed nothing" for name in sorted(text.keys() - {"format"}) if text[name]]
    given = text.get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ApiError(400, "text.format must be an object", "text")
    if given.get("type") != "json_schema":
        return dict(given)
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def logprobs(request: ResponsesRequest, notes: list[str]) -> int | None:
    """How many alternatives of each token are wanted; None: not even its own probability. Raises ApiError."""
    wanted: Sequence[str] = request.include or []
    for name in wanted:
        if name in _NOTHING_TO_INCLUDE:
            notes.append(f"include: there is no {name} here")
        elif name != "message.output_text.logprobs":
            raise ApiError(400, f"include has {short(name)}, which is not known", "include")
    if "message.output_text.logprobs" in wanted or request.top_logprobs:
        return request.top_logprobs or 0
    return None
