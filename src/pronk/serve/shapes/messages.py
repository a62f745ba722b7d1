"""Answers of /v1/messages, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pronk.serve.shapes.common import Besides, MessagesProblem, Shape, Warned


class Block(Shape):
    """A text block has text; a tool_use block id, name and input."""

    type: Literal["text", "tool_use"]
    text: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageAnswer(Shape):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    pronk: Besides | UnsetType = UNSET


class BlockDelta(Shape):
    """Of a text, of a call's arguments, or how the message ended."""

    type: Literal["text_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Shape):
    type: Literal[
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "error",
    ]  # fmt: skip
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: MessagesProblem | UnsetType = UNSET
    pronk: Besides | UnsetType = UNSET


class MessageCount(Shape):
    input_tokens: int
    pronk: Warned | UnsetType = UNSET
