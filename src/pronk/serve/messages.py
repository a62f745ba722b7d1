"""/v1/messages, as Anthropic has it: https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pronk.errors import ContextOverflow
from pronk.serve import asking, blocks
from pronk.serve.asking import Asked
from pronk.serve.engine import Engine
from pronk.serve.failures import ApiError, amid, renamed
from pronk.serve.http import event
from pronk.serve.models import Leased
from pronk.serve.requests import MessagesRequest, sampling
from pronk.serve.speech import Account, Piece, speech, warned

REFUSED = {
    "container": "cannot be had: this server runs no code",
    "context_management": "cannot be had; leave out what is not needed",
    "mcp_servers": "cannot be had: this server asks no others",
    "n": "cannot be had: a message is one text",
    "stop": "is stop_sequences in Anthropic's API",
    "response_format": "is output_config.format in Anthropic's API",
}
_FIELDS = {"stop": "stop_sequences", "response_format": "output_config"}


async def asked(
    leased: Leased, request: MessagesRequest, unheard: list[str], max_samples: int, notes: list[str] | None = None
) -> Asked:
    """`notes`: where what the answer is to say goes as well. Raises ApiError, and PronkError for what the model cannot
    follow."""
    if (request.thinking or {}).get("type", "disabled") != "disabled":
        raise ApiError(400, "thinking cannot be had: this model writes its answer at once", "thinking")
    notes = [] if notes is None else notes
    if "cache_control" in unheard:
        unheard.remove("cache_control")
        blocks.note({"cache_control": True}, notes)
    choice, parallel = blocks.tool_choice(request)

    def made() -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any] | None]:
        return blocks.messages(request, notes), blocks.tools(request, notes), blocks.form(request, notes)

    messages, tools, form = await asyncio.to_thread(made)  # of which there may be many
    with renamed(_FIELDS):
        found = await asking.chat(
            leased,
            messages,
            sampling(request, stop=request.stop_sequences, response_format=form),
            max_tokens=request.max_tokens,
            logprobs=None,
            max_samples=max_samples,
            unheard=unheard,
            tools=tools,
            tool_choice=choice,
            parallel=parallel,
        )
    return replace(found, notes=notes)


async def count(leased: Leased, request: MessagesRequest, unheard: list[str]) -> dict[str, Any]:
    """How many tokens the prompt has, also where these are more than the model can read. Raises what `asked` does."""
    notes = list[str]()
    try:
        found = await asked(leased, request, unheard, 1, notes)
    except ApiError as error:
        if isinstance(error.__cause__, ContextOverflow):
            return {"input_tokens": error.__cause__.prompt_tokens, **warned(unheard, notes)}
        raise
    return {"input_tokens": len(found.wanted.prompts[0]) + found.cut, **warned(found.unheard, found.notes)}


class _Message:
    """An answer as it grows, and the events that tell of it. One block is open at a time: the last."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._account = asked, Account()
        self._content: list[dict[str, Any]] = []
        self._arguments = ""  # of the call that is open
        self._open = False
        self.fields: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": asked.leased.name,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(len(asked.wanted.prompts[0]), 0, 0),
        }

    async def grow(self, engine: Engine) -> AsyncGenerator[bytes, None]:
        """Raises what speech does."""
        begun = False
        async with aclosing(speech(engine, self._asked, self._account)) as coming:
            async for pieces in coming:
                found = [] if begun else [_event("message_start", message=self.fields), _event("ping")]
                begun = True
                for piece in pieces:
                    found += self._add(piece)
                yield b"".join(found)

    def _add(self, piece: Piece) -> Iterator[bytes]:
        for part in piece.parts:
            if isinstance(part, str):
                if not self._open or self._content[-1]["type"] != "text":
                    yield from self._begin({"type": "text", "text": ""})
                self._content[-1]["text"] += part
                yield self._delta({"type": "text_delta", "text": part})
                continue
            if part.name is not None:
                yield from self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            if part.arguments:
                self._arguments += part.arguments
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        if piece.finish:
            yield from self._close()
            yield from self._end(piece)

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open, self._arguments = True, ""
        self._content.append(block)
        yield _event("content_block_start", index=len(self._content) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = False
        if self._content[-1]["type"] == "tool_use":
            try:
                self._content[-1]["input"] = json.loads(self._arguments or "{}")
            except (ValueError, RecursionError):  # a call that was cut short, or nests without end, is text
                self._content[-1] = {"type": "text", "text": self._arguments}
        yield _event("content_block_stop", index=len(self._content) - 1)

    def _end(self, piece: Piece) -> Iterator[bytes]:
        used = self._account
        stop = piece.chunk.stop if piece.finish == "stop" else None
        reasons = {"tool_calls": "tool_use", "length": self._limit(), "stop": "stop_sequence" if stop else "end_turn"}
        ended = {"stop_reason": reasons[piece.finish or "stop"], "stop_sequence": stop}
        besides = used.besides(self._asked)
        self.fields |= {**ended, "usage": self._usage(used.prompt_tokens, used.cached_tokens, used.new_tokens)}
        self.fields["pronk"] = besides
        yield _event("message_delta", delta=ended, usage=self.fields["usage"], pronk=besides)
        yield _event("message_stop")

    def _limit(self) -> str:
        """Which one the text came to."""
        room = self._asked.wanted.params.max_new_tokens
        return "max_tokens" if self._account.new_tokens >= room else "model_context_window_exceeded"

    def _usage(self, prompt: int, cached: int, new: int) -> dict[str, Any]:
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": new,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


async def whole(engine: Engine, asked: Asked) -> dict[str, Any]:
    message = _Message(asked)
    async for _ in message.grow(engine):
        pass
    return message.fields


async def stream(engine: Engine, asked: Asked) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with aclosing(_Message(asked).grow(engine)) as coming:
            async for events in coming:
                begun = True
                yield events
    except Exception as error:
        if not begun:
            raise
        yield event(amid(error).anthropic(), "error")
