"""Messages of a record, as OpenAI has them: {"role", "content"}, "tool_calls", and on the assistant's a "weight"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pronk.errors import short
from pronk.train.data.containers import BadRecord

Message = dict[str, Any]

_TOOL_ROLES = ("tool", "ipython")  # whose content may be any JSON
_SPEAKERS = re.compile(r"\n\n(Human|Assistant):")  # of Anthropic's HH-RLHF
_ROLES = {"Human": "user", "Assistant": "assistant"}


def checked(key: str, value: object) -> list[Message]:
    """The messages without keys that are null, which is how Parquet writes absent ones. Raises BadRecord."""
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{key} must be a list of messages, not {short(value)}")
    found = []
    for number, raw in enumerate(value):
        if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
            raise BadRecord(f'{key}: message {number} must be {{"role": ..., "content": ...}}, not {short(raw)}')
        message = {name: it for name, it in raw.items() if it is not None}
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


def learned(message: Mapping[str, Any]) -> bool:
    """Whether it is an answer, and not one that OpenAI's "weight" leaves out."""
    return message["role"] == "assistant" and message.get("weight") != 0


def of_text(text: str) -> list[Message] | None:
    """The conversation that HH-RLHF writes as one text, "\\n\\nHuman: ...\\n\\nAssistant: ..."; None of any other."""
    before, *parts = _SPEAKERS.split(text)
    if before or not parts:
        return None
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]
