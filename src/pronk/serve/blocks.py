"""Blocks: what a request of Anthropic's API holds, made into a chat's messages, tools and form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk.errors import short
from pronk.serve.failures import ApiError
from pronk.serve.requests import MessagesRequest
from pronk.serve.tools import check_count

_MOST_NOTES = 100  # each is looked for among them
_CACHED = "cache_control changed nothing: the beginnings of prompts are cached as they are"


def messages(request: MessagesRequest, notes: list[str]) -> list[dict[str, Any]]:
    """`notes`: where what changes nothing is added, a sentence each. Raises ApiError."""
    if not request.messages:
        raise ApiError(400, "messages is empty", "messages")
    found: list[dict[str, Any]] = []
    if request.system:
        found.append({"role": "system", "content": _text("system", request.system, notes)})
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for number, message in enumerate(request.messages):
        where, role, content = f"message {number}", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ApiError(400, f"{where} has the role {short(role)}; it can be user or assistant", "messages")
        if not isinstance(content, list):
            found.append({"role": role, "content": _text(where, content, notes)})
        elif role == "assistant":
            found.append(_said(where, content, names, notes))
        else:
            found += _asked(where, str(role), content, names, notes)
    if found and found[-1]["role"] == "assistant":
        problem = "the last message is the assistant's: its text cannot be gone on with; end with the user's"
        raise ApiError(400, problem, "messages")
    return found


def _text(where: str, content: object, notes: list[str]) -> str | list[dict[str, Any]]:
    """Of blocks that must all be text. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} has no content: a text, or a list of blocks", "messages")
    return [_part(where, block, notes) for block in content]


def _part(where: str, block: object, notes: list[str]) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or kind != "text":
        raise ApiError(400, f"{where} has a block of type {short(kind)}, which cannot be had here", "messages")
    note(block, notes)
    if not isinstance(block.get("text"), str):
        raise ApiError(400, f"{where} has a text block without text", "messages")
    return {"type": "text", "text": block["text"]}


def _said(where: str, content: list[Any], names: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """A message of the assistant's: texts, and calls of tools."""
    parts, calls = [], []
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "tool_use":
            parts.append(_part(where, block, notes))
            continue
        note(block, notes)
        id, name, given = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(id, str) or not isinstance(name, str) or not isinstance(given, Mapping):
            raise ApiError(400, f"{where} has a tool_use block without id, name and input", "messages")
        names[id] = name
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": given}})
    return {"role": "assistant", "content": parts or None, **({"tool_calls": calls} if calls else {})}


def _asked(where: str, role: str, content: list[Any], names: dict[str, str], notes: list[str]) -> list[dict[str, Any]]:
    """A message of the user's: texts, and what tools gave, each of which is a message of its own in a chat."""
    found: list[dict[str, Any]] = []
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "tool_result":
            if not found or found[-1]["role"] != role:
                found.append({"role": role, "content": []})
            found[-1]["content"].append(_part(where, block, notes))
            continue
        note(block, notes)
        id = block.get("tool_use_id")
        if not isinstance(id, str):
            raise ApiError(400, f"{where} has a tool_result block without tool_use_id", "messages")
        if block.get("is_error"):
            _add(notes, "is_error changed nothing: templates have no place for it; say it in the content")
        given = block.get("content")
        text = "" if given is None else _text(where, given, notes)
        found.append({"role": "tool", "tool_call_id": id, "name": names.get(id), "content": text})
    if not found:
        raise ApiError(400, f"{where} has no content", "messages")
    return found


def note(block: Mapping[str, Any], notes: list[str]) -> None:
    """What of a block is known, and changes no text."""
    if block.get("cache_control"):
        _add(notes, _CACHED)
    if block.get("citations"):
        _add(notes, "citations changed nothing")


def _add(notes: list[str], note: str) -> None:
    if note not in notes:
        if len(notes) >= _MOST_NOTES:
            raise ApiError(
                400, f"more than {_MOST_NOTES} things in this request would change nothing, such as: {note[:80]}"
            )
        notes.append(note)


def tools(request: MessagesRequest, notes: list[str]) -> list[dict[str, Any]] | None:
    """In the chat's form. Raises ApiError."""
    found = []
    check_count(request.tools or ())
    for tool in request.tools or []:
        if tool.get("type") not in (None, "custom"):
            problem = f"tools of type {short(tool['type'])} cannot be had; this server calls functions of yours"
            raise ApiError(400, problem, "tools")
        if not isinstance(tool.get("input_schema"), Mapping):
            raise ApiError(400, "a tool must have an input_schema", "tools")
        note(tool, notes)
        known = {"type", "name", "description", "input_schema", "strict", "cache_control"}
        for name in sorted(tool.keys() - known):
            if tool[name]:
                _add(notes, f"{name} of a tool changed nothing")
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found or None


def tool_choice(request: MessagesRequest) -> tuple[str | dict[str, Any] | None, bool]:
    """In the chat's form, and whether several tools may be called at once. Raises ApiError."""
    choice = request.tool_choice
    if choice is None:
        return None, True
    parallel = not choice.get("disable_parallel_tool_use")
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind not in ("auto", "any", "none"):
        raise ApiError(400, f"tool_choice is of type auto, any, tool or none, not {short(kind)}", "tool_choice")
    return "required" if kind == "any" else str(kind), parallel


def form(request: MessagesRequest, notes: list[str]) -> dict[str, Any] | None:
    """The chat's response_format. Raises ApiError."""
    config = request.output_config or {}
    for name in sorted(config.keys() - {"format"}):
        if config[name]:
            _add(notes, f"output_config.{name} changed nothing")
    given = config.get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise ApiError(400, "output_config.format is of type json_schema", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}
