"""/v1/chat/completions: https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from pronk import __version__
from pronk.serve.asking import Asked
from pronk.serve.calls import Call
from pronk.serve.engine import Engine
from pronk.serve.failures import ApiError, amid
from pronk.serve.http import DONE, Chunks, event
from pronk.serve.requests import ChatRequest
from pronk.serve.speech import Account, entries_of, speech

REFUSED = {
    "prompt": "is a completion's, for /v1/completions; a chat takes messages",
    "functions": "is an older form of tools; give tools",
    "function_call": "is an older form of tool_choice; give tool_choice",
    "audio": "cannot be had: this server speaks in text",
    "web_search_options": "cannot be had: this server searches nowhere",
    "chat_template": "is the server's, never a request's",
    "documents": "cannot be had; put them into the messages",
    "best_of": "cannot be had; give n, and choose",
    "prompt_logprobs": "is for /v1/completions with echo",
    "lora_request": "cannot be had; an adapter is a model of its own here",
}
FINGERPRINT = f"pronk-{__version__}"


def logprobs_of(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs is for logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def max_tokens_of(request: ChatRequest) -> int | None:
    both = request.max_tokens is not None and request.max_completion_tokens is not None
    if both and request.max_tokens != request.max_completion_tokens:
        raise ApiError(400, "max_tokens is the older name of max_completion_tokens; give one of them", "max_tokens")
    return request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens


def check_stream(stream: bool | None, options: dict[str, Any] | None) -> bool:
    """Whether usage is wanted at the end of the stream. Raises ApiError."""
    if options is None:
        return False
    if not stream:
        raise ApiError(400, "stream_options is for stream: true", "stream_options")
    if unknown := sorted(options.keys() - {"include_usage", "include_obfuscation", "continuous_usage_stats"}):
        raise ApiError(400, f"stream_options has no {unknown[0][:40]!r}", "stream_options")
    if options.get("continuous_usage_stats"):
        raise ApiError(400, "continuous_usage_stats cannot be had; usage comes at the end", "stream_options")
    include = options.get("include_usage")
    if not isinstance(include, bool | None):
        raise ApiError(400, "include_usage of stream_options is true or false", "stream_options")
    return bool(include)


async def whole(engine: Engine, asked: Asked) -> dict[str, Any]:
    texts: dict[int, list[str]] = {n: [] for n in range(asked.samples)}
    calls: dict[int, dict[int, dict[str, Any]]] = {n: {} for n in texts}
    entries: dict[int, list[dict[str, Any]]] = {n: [] for n in texts}
    finishes: dict[int, str | None] = {}
    account = Account()
    async for pieces in speech(engine, asked, account):
        for piece in pieces:
            entries[piece.index] += entries_of(asked, piece.chunk)
            for part in piece.parts:
                if isinstance(part, Call):
                    _collect(calls[piece.index], part)
                else:
                    texts[piece.index].append(part)
            if piece.finish:
                finishes[piece.index] = piece.finish
    choices = []
    for index in sorted(finishes):
        text, its = "".join(texts[index]), list(calls[index].values())
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not its else None, "refusal": None}
        if its:
            message["tool_calls"] = its
        logprobs = {"content": entries[index], "refusal": None} if asked.wanted.params.logprobs is not None else None
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finishes[index]})
    return {
        **head("chatcmpl", "chat.completion", asked),
        "choices": choices,
        "usage": account.usage(),
        "pronk": account.besides(asked),
    }


async def stream(engine: Engine, asked: Asked, include_usage: bool) -> AsyncGenerator[bytes, None]:
    common = head("chatcmpl", "chat.completion.chunk", asked)
    chunks = Chunks(common, {"usage": None} if include_usage else {})
    account, begun, left = Account(), False, asked.samples
    wants_logprobs = asked.wanted.params.logprobs is not None

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return chunks.event(choice, **more)

    try:
        async for pieces in speech(engine, asked, account):
            out = []
            if not begun:
                begun = True
                out += [chunk(n, {"role": "assistant", "content": "", "refusal": None}) for n in range(asked.samples)]
            for piece in pieces:
                logprobs = None
                if wants_logprobs and (entries := entries_of(asked, piece.chunk)):
                    logprobs = {"content": entries, "refusal": None}
                deltas = [_delta(part) for part in piece.parts] or ([{"content": ""}] if logprobs else [])
                for delta in deltas:
                    out.append(chunk(piece.index, delta, logprobs=logprobs))
                    logprobs = None
                if piece.finish:
                    left -= 1
                    more = last_of(account, asked, include_usage) if not left else {}
                    out.append(chunk(piece.index, {}, piece.finish, **more))
            yield b"".join(out)
    except Exception as error:
        if not begun:
            raise
        yield event(amid(error).openai(), "error")
        return
    end = {**common, "choices": [], "usage": account.usage()} if include_usage else None
    if end:
        yield event({**end, "pronk": account.besides(asked)})
    yield DONE


def last_of(account: Account, asked: Asked, include_usage: bool) -> dict[str, Any]:
    """What the last choice of a stream brings: without a usage chunk behind it there is no other place to tell the seed
    in, and fields that nobody heeds."""
    return {} if include_usage else {"pronk": account.besides(asked)}


def head(prefix: str, kind: str, asked: Asked) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.leased.name,
        "system_fingerprint": FINGERPRINT,
    }


def _delta(part: str | Call) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    call: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
    if part.name is not None:
        call |= {"id": part.id, "type": "function"}
        call["function"] = {"name": part.name, "arguments": part.arguments}
    return {"tool_calls": [call]}


def _collect(calls: dict[int, dict[str, Any]], part: Call) -> None:
    if part.name is not None:
        calls[part.index] = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
    calls[part.index]["function"]["arguments"] += part.arguments
