"""What requests may hold: one record each, whose types are checked before a value is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

import msgspec

from pronk.errors import short
from pronk.serve import bounds
from pronk.serve.failures import ApiError

S = TypeVar("S", bound=msgspec.Struct)

# What SDKs send of themselves, and what changes no text.
_IGNORED = {
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "thread_id", "prompt_cache_options",
}  # fmt: skip


class Drawing(msgspec.Struct, kw_only=True):
    """How a text is drawn, by the names of SamplingParams, in every API. None: the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    rng: str | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculative: str | None = None
    truncate: str | None = None
    stream: bool | None = None


class Sampling(Drawing, kw_only=True):
    """And what OpenAI's chat and completions have besides: which form texts have, and where they end."""

    n: int | None = None
    stop: str | list[str] | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatRequest(Sampling, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    answer_ids: list[int] | None = None  # pronk's own: tokens that the answer begins with


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[Any] = ""
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ResponsesRequest(Drawing, kw_only=True):
    """https://platform.openai.com/docs/api-reference/responses, without what a server would have to remember."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class MessagesRequest(Drawing, kw_only=True):
    """https://docs.anthropic.com/en/api/messages"""

    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class CountRequest(MessagesRequest, kw_only=True):
    """The same, where nothing is generated."""

    max_tokens: int = 1


class AttentionOf(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    token: int
    layer: int
    head: int | None = None


class LensOf(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    token: int
    k: int = 5


class LookRequest(msgspec.Struct, kw_only=True):
    """pronk's own: what LLM.look is given (`text` or `messages`), or the `look` that was taken before; and what is to
    be shown of it: tokens `start` to `stop`, attention of one, the logit lens of one."""

    model: str | None = None
    text: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    answer: str | list[int] | None = None
    max_tokens: int | None = None  # to go on with, greedily
    top: int | None = None
    look: str | None = None
    start: int | None = None
    stop: int | None = None
    attention: AttentionOf | None = None
    lens: LensOf | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's form (`prompt` or `messages`) and llama.cpp's (`content`)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


_TYPES = {  # of JSON, as msgspec calls them
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip
_FEW = 64  # unknown fields that are held against a missing one
_ASK_EMPTY = {"web_search_options"}  # {} asks for a search, as OpenAI has it


def read(body: bytes, kind: type[S], refused: Mapping[str, str]) -> tuple[S, list[str]]:
    """The request, and the names of fields that it has and nobody heeds.

    `refused`: fields that would change the answer and cannot be had, with why. Raises ApiError.
    """
    if too_much := bounds.problem(body):
        raise ApiError(400, too_much)
    try:
        given = bounds.parsed(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, not {short(given)}")
    given = {name: value for name, value in given.items() if value is not None}
    for name, why in refused.items():
        if name in given and (given[name] not in ([], {}, "", False) or name in _ASK_EMPTY):
            raise ApiError(400, f"{name} {why}", name)
    try:
        request = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem = str(error)
        at = problem.rpartition("$")[2].strip("`.") if "$" in problem else None
        if "missing required field" in problem:
            at = problem.rpartition("field ")[2].strip("`")
            if "$" not in problem:
                others = islice((name for name in given if name not in kind.__struct_fields__), _FEW)
                near = get_close_matches(at, others, 1)
                problem = f"the request has no {at}" + (f"; did you mean {at} by {short(near[0])}?" if near else "")
        raise ApiError(400, _in_words(problem), (at or "").partition("[")[0] or None) from None
    # Not msgspec.structs.fields, which evaluates all annotations anew: that took 1 ms of each request.
    return request, sorted(given.keys() - {*kind.__struct_fields__} - _IGNORED - refused.keys())


def _in_words(problem: str) -> str:
    """msgspec's word of a wrong type in those of the other refusals; all else as it is."""
    found = re.fullmatch(r"Expected `([^`]+)`, got `(\w+)` - at `\$\.([^`]+)`", problem)
    if not found:
        return problem.replace("$.", "")
    wanted = [_TYPES.get(name, name) for name in found[1].split(" | ") if name != "null"]
    given = "a fraction" if found[2] == "float" else _TYPES.get(found[2], found[2])
    return f"{found[3]} must be {' or '.join(wanted)}, not {given}"


def sampling(request: Drawing, **more: Any) -> Sampling:
    """The same as OpenAI's chat has it, for what computes texts. `more`: what that has and `request` has not."""
    return Sampling(**{name: getattr(request, name) for name in Drawing.__struct_fields__}, **more)
