"""/v1/responses, of which nothing is kept: https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pronk.serve import asking, items
from pronk.serve.asking import Asked
from pronk.serve.engine import Engine
from pronk.serve.failures import ApiError, amid, renamed
from pronk.serve.http import event
from pronk.serve.models import Leased
from pronk.serve.requests import ResponsesRequest, sampling
from pronk.serve.speech import Account, Piece, entries_of, speech

_KEPT = "cannot be had: this server keeps no answers; give all of the conversation in input"
REFUSED = {
    "previous_response_id": _KEPT,
    "conversation": _KEPT,
    "prompt": "names a prompt kept elsewhere; give it in instructions and input",
    "background": "cannot be had: an answer is given while it is waited for",
    "context_management": "cannot be had; truncation auto leaves out the oldest turns",
    "n": "cannot be had: a response is one text",
    "stop": "cannot be had in the Responses API; /v1/chat/completions has it",
    "response_format": "is text.format in the Responses API",
    "max_tokens": "is max_output_tokens in the Responses API",
    "messages": "is input in the Responses API",
}
_FIELDS = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}


async def asked(leased: Leased, request: ResponsesRequest, unheard: list[str], max_samples: int) -> Asked:
    """Raises ApiError, and PronkError for what the model cannot follow."""
    if request.truncation not in (None, "auto", "disabled"):
        raise ApiError(400, "truncation is auto or disabled", "truncation")
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options is for stream: true", "stream_options")
    notes = ["store changed nothing: this server keeps no answers"] if request.store else []

    def made() -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any] | None]:
        return items.messages(request, notes), items.tools(request, notes), items.form(request, notes)

    messages, tools, form = await asyncio.to_thread(made)  # of which there may be many
    with renamed(_FIELDS):
        found = await asking.chat(
            leased,
            messages,
            sampling(request, response_format=form),
            max_tokens=request.max_output_tokens,
            logprobs=items.logprobs(request, notes),
            max_samples=max_samples,
            unheard=unheard,
            tools=tools,
            tool_choice=items.tool_choice(request),
            parallel=request.parallel_tool_calls,
            overflow="drop-oldest" if request.truncation == "auto" else "error",
        )
    return replace(found, notes=notes)


class _Response:
    """An answer as it grows, and the events that tell of it, ready to be sent: what they tell of goes on changing.

    Pieces of text are one message item as long as no call comes between, and each call is an item. One item is open
    at a time: the last of `output`.
    """

    def __init__(self, asked: Asked, request: ResponsesRequest) -> None:
        self._asked, self._account = asked, Account()
        self._output: list[dict[str, Any]] = []
        self._open, self._number = False, 0
        self._waiting: list[dict[str, Any]] = []  # log-probabilities whose text is held back
        params = asked.wanted.params
        self.fields: dict[str, Any] = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": asked.leased.name,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [{"strict": False, "parameters": None, **tool} for tool in request.tools or []],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
        }

    async def grow(self, engine: Engine) -> AsyncGenerator[bytes, None]:
        """Raises what speech does."""
        begun = False
        async with aclosing(speech(engine, self._asked, self._account)) as coming:
            async for pieces in coming:
                found = [] if begun else [self._of_all("created"), self._of_all("in_progress")]
                begun = True
                for piece in pieces:
                    found += self._add(piece)
                yield b"".join(found)

    def fail(self, error: Exception) -> bytes:
        told = amid(error)
        code = "rate_limit_exceeded" if told.status == 429 else "server_error"
        self.fields |= {"status": "failed", "error": {"code": code, "message": told.message}}
        return self._of_all("failed")

    def _add(self, piece: Piece) -> Iterator[bytes]:
        self._waiting += entries_of(self._asked, piece.chunk)
        for part in piece.parts:
            if isinstance(part, str):
                yield from self._say(part)
                continue
            if part.name is not None:
                yield from self._close("completed")
                call = {"id": _id("fc"), "type": "function_call", "call_id": part.id, "name": part.name}
                yield from self._begin({**call, "arguments": ""})
            if part.arguments:
                self._output[-1]["arguments"] += part.arguments
                yield self._of_item("function_call_arguments.delta", delta=part.arguments)
            self._waiting.clear()  # a call has no probabilities
        if piece.finish:
            yield from self._end(cut=piece.finish == "length")

    def _say(self, text: str) -> Iterator[bytes]:
        if not self._open or self._output[-1]["type"] != "message":
            yield from self._close("completed")
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin({"id": _id("msg"), "type": "message", "role": "assistant", "content": []})
            self._output[-1]["content"].append(part)
            yield self._of_item("content_part.added", content_index=0, part=part)
        logprobs, self._waiting = self._waiting, []
        if text or logprobs:
            part = self._output[-1]["content"][0]
            part["text"] += text
            part["logprobs"] += logprobs
            yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin(self, item: dict[str, Any]) -> Iterator[bytes]:
        self._open = True
        self._output.append({**item, "status": "in_progress"})
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._of_item("output_text.done", content_index=0, **said)
            yield self._of_item("content_part.done", content_index=0, part=part)
        else:
            yield self._of_item("function_call_arguments.done", arguments=item["arguments"])
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _end(self, cut: bool) -> Iterator[bytes]:
        status = "incomplete" if cut else "completed"
        if not self._output or (self._waiting and self._output[-1]["type"] == "message"):
            yield from self._say("")  # an answer without a word is a message, too
        yield from self._close(status)
        usage = self._account.usage()
        self.fields |= {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "pronk": self._account.besides(self._asked),
        }
        yield self._of_all(status)

    def _of_all(self, kind: str) -> bytes:
        return self._event(kind, response=self.fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind, number, self._number = f"response.{kind}", self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


async def whole(engine: Engine, asked: Asked, request: ResponsesRequest) -> dict[str, Any]:
    response = _Response(asked, request)
    async for _ in response.grow(engine):
        pass
    return response.fields


async def stream(engine: Engine, asked: Asked, request: ResponsesRequest) -> AsyncGenerator[bytes, None]:
    response, begun = _Response(asked, request), False
    try:
        async with aclosing(response.grow(engine)) as coming:
            async for events in coming:
                begun = True
                yield events
    except Exception as error:
        if not begun:
            raise
        yield response.fail(error)
