"""Shapes: what answers hold, as /openapi.json describes them. Answers are made as dicts; tests hold them to these."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """A field that can be missing is UNSET by default; all others are always there."""


class Besides(Shape):
    """What an answer took, and what of its request changed nothing."""

    seed: int | None
    first_token_s: float | UnsetType = UNSET
    prompt_tokens_per_s: float | UnsetType | None = UNSET
    tokens_per_s: float | UnsetType | None = UNSET
    truncated_tokens: int | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


# -- errors --


class Problem(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    """OpenAI's form."""

    error: Problem


class MessagesProblem(Shape):
    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
        "rate_limit_error", "overloaded_error", "api_error",
    ]  # fmt: skip


class MessagesError(Shape):
    """Anthropic's form."""

    type: Literal["error"]
    error: MessagesProblem


# -- chat and completions --


class Alternative(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class Function(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class PromptDetails(Shape):
    cached_tokens: int


class CompletionDetails(Shape):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    pronk: Besides


class FunctionDelta(Shape):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Shape):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Shape):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    pronk: Besides | UnsetType = UNSET


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Shape):
    """Streamed, each event is one, with what came."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    pronk: Besides | UnsetType = UNSET


# -- responses --


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


# -- messages --


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


# -- the rest --


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | UnsetType = UNSET


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Spelled(Shape):
    id: int
    piece: str | list[int]


class Tokens(Shape):
    """vLLM's form has count and max_model_len; llama.cpp's has pieces, where these are asked for."""

    tokens: list[int | Spelled]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class Text(Shape):
    prompt: str
    content: str


class Health(Shape):
    status: Literal["ok", "loading", "ending"]
    version: str | UnsetType = UNSET


# -- what requests hold in their lists, whose own records say only that they are lists --


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
