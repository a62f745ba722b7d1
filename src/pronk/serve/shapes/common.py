"""What all answers have, errors in both forms, and the answers that are pronk's own."""

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


class Warned(Shape):
    """The same of an answer that is no text."""

    warnings: list[str]


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


class ModelFacts(Shape):
    """Of a model that is loaded. `look_tokens`: the most that one look can have. `sampling`: as its makers advise."""

    dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_a_token: int
    layers: int
    heads: int
    vocabulary: int
    sampling: dict[str, Any]
    look_tokens: int


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | UnsetType = UNSET
    pronk: ModelFacts | UnsetType = UNSET


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
    pronk: Warned | UnsetType = UNSET


class Text(Shape):
    prompt: str
    content: str
    pronk: Warned | UnsetType = UNSET


class Health(Shape):
    status: Literal["ok", "loading", "ending", "failed"]
    version: str | UnsetType = UNSET
