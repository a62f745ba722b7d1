"""Answers of /v1/responses, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pronk.serve.shapes.chat import TokenLogprob
from pronk.serve.shapes.common import Besides, Shape


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[TokenLogprob]


class OutputItem(Shape):
    """A message has role and content; a call of a function call_id, name and arguments."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[OutputText] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseProblem(Shape):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseAnswer(Shape):
    """An answer of /v1/responses; as it grows, an event has it as it is then."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseProblem | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    pronk: Besides | UnsetType = UNSET


class ResponseEvent(Shape):
    """response.created, in_progress, completed, incomplete and failed have `response`; the others tell of an item."""

    type: Literal[
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed", "response.incomplete", "response.failed",
    ]  # fmt: skip
    sequence_number: int
    response: ResponseAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
