"""What requests hold in their lists, of which their own records say only that they are lists."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | UnsetType | None = UNSET


class MessagesMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock]


class InputPart(msgspec.Struct):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(msgspec.Struct, tag="function_call_output"):
    call_id: str
    output: str | list[InputPart]
