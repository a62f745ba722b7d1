"""Messages of a record, as OpenAI has them: {"role", "content"}, "tool_calls", and on the assistant's a "weight".

Or as ShareGPT has them, {"from", "value"}, which become those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pronk.errors import short
from pronk.train.data.containers import BadRecord

Message = dict[str, Any]

_TOOL_ROLES = ("tool", "ipython")  # whose content may be any JSON
_SPEAKERS = re.compile(r"\n\n(Human|Assistant):")  # of Anthropic's HH-RLHF
_ROLES = {"Human": "user", "Assistant": "assistant"}
# Who speaks in ShareGPT's conversations, and in those that were made after them.
_FROM = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_CALLS = "function_call"


def checked(key: str, value: object) -> list[Message]:
    """The messages without keys that are null, which is how Parquet writes absent ones. Raises BadRecord."""
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{key} must be a list of messages, not {short(value)}")
    found = []
    for number, raw in enumerate(value):
        if isinstance(raw, Mapping) and "from" in raw and "role" not in raw:
            raw = _of_sharegpt(raw, f"message {number} of {key}")
        if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
            raise BadRecord(f'{key}: message {number} must be {{"role": ..., "content": ...}}, not {short(raw)}')
        message = {name: it for name, it in raw.items() if it is not None}
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_read(call) for call in message["tool_calls"]]
        _check(f"message {number}", key, message)
        found.append(message)
    return found


def _check(name: str, key: str, message: Message) -> None:
    content, answers = message.get("content"), message["role"] == "assistant"
    calls = answers and bool(message.get("tool_calls"))
    if not isinstance(content, str) and message["role"] not in _TOOL_ROLES and not (content is None and calls):
        raise BadRecord(f"{key}: the content of {name} must be text, not {short(content)}")
    if answers and learned(message) and not calls and not str(content).strip():
        raise BadRecord(f"has no answer: {name} of {key} is the assistant's and empty")
    if "weight" in message:
        weight = message["weight"]
        if type(weight) not in (int, float) or weight not in ((0, 1) if answers else (0,)):
            rule = "0 or 1" if answers else "0: only the assistant's are learned"
            raise BadRecord(f"{key}: the weight of {name} must be {rule}, not {short(weight)}")


def _of_sharegpt(raw: Mapping[str, Any], name: str) -> Message:
    """Raises BadRecord."""
    who, said = raw["from"], raw.get("value")
    rest = {key: it for key, it in raw.items() if key not in ("from", "value")}
    if who == _CALLS:
        return {**rest, "role": "assistant", "content": "", "tool_calls": _calls(said, name)}
    if not isinstance(who, str) or who not in _FROM:
        known = ", ".join((*_FROM, _CALLS))
        raise BadRecord(f"{name} is from {short(who)}, whom nobody knows; known are {known}")
    if "content" in rest:
        raise BadRecord(f"{name} has both value and content; leave one out")
    return {**rest, "role": _FROM[who], "content": said}


def _calls(said: object, name: str) -> list[dict[str, Any]]:
    """Of functions, which are written as JSON: {"name", "arguments"}, or a list of such."""
    try:
        found = json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError):
        found = None
    calls: list[Any] = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in calls):
        raise BadRecord(f'{name} must be a call of a function as JSON, {{"name", "arguments"}}, not {short(said)}')
    return [{"type": "function", "function": dict(one)} for one in calls]


def _read(call: Any) -> Any:
    """A call whose arguments are an object, for templates write that as JSON: OpenAI has a string of JSON there, which
    would become JSON in JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(said := function.get("arguments"), str)):
        return call
    try:
        found = json.loads(said or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call


def learned(message: Mapping[str, Any]) -> bool:
    """Whether it is an answer, and not one that OpenAI's "weight" leaves out."""
    return message["role"] == "assistant" and message.get("weight") != 0


def of_text(text: str) -> list[Message] | None:
    """The conversation that HH-RLHF writes as one text, "\\n\\nHuman: ...\\n\\nAssistant: ..."; None of any other."""
    before, *parts = _SPEAKERS.split(text)
    if before or not parts:
        return None
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]
