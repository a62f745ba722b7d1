"""Answers of /v1/chat/completions and /v1/completions, and the events of their streams."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from pronk.serve.shapes.common import Besides, Shape


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
