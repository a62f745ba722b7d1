"""A load on a server of OpenAI's completions: many streams at once, and when each piece of each came.

A client of few instructions, for it shares the processor with what it measures: while an answer comes it only keeps
what the socket gives, and when; it is read once it is whole.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_TEXT = re.compile(rb'"text": ?"[^"]')


@dataclass(frozen=True)
class Asked:
    """`at`: seconds after the start that it is sent, in an open loop."""

    prompt: list[int] | str
    new: int
    at: float = 0.0


@dataclass
class Taken:
    """Seconds on one clock: when it was sent, and when its pieces came."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    failed: str = ""

    @property
    def first_s(self) -> float:
        """TTFT: from sending to the first piece."""
        return self.pieces[0] - self.sent if self.pieces else math.inf

    @property
    def gaps_s(self) -> list[float]:
        """ITL: between pieces."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def per_token_s(self) -> float:
        """TPOT: of the tokens after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.new_tokens - 1) if self.pieces else math.inf


@dataclass(frozen=True)
class Client:
    """`extra`: fields of each request besides. A server that tells no usage is believed if it ended by the length."""

    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    async def ask(self, asked: Asked) -> Taken:
        taken = Taken(time.perf_counter())
        loop = asyncio.get_running_loop()
        try:
            transport, answer = await loop.create_connection(lambda: _Answer(loop.create_future()), *self._at)
            try:
                transport.write(self._request(asked))
                await answer.ended
            finally:
                transport.close()
            _read(answer.parts, taken, asked.new)
        except (OSError, ValueError, KeyError) as error:
            taken.failed = f"{type(error).__name__}: {error}"
        taken.ended = time.perf_counter()
        return taken

    def ask_alone(self, asked: Asked) -> Taken:
        """The same where there is one stream, which needs no event loop, and leaves what one takes to the server."""
        taken, parts, buffer = Taken(time.perf_counter()), _Parts(), memoryview(bytearray(1 << 16))
        try:
            with socket.create_connection(self._at) as connection:
                connection.sendall(self._request(asked))
                while count := connection.recv_into(buffer):
                    parts.append((time.perf_counter(), bytes(buffer[:count])))
            _read(parts, taken, asked.new)
        except (OSError, ValueError, KeyError) as error:
            taken.failed = f"{type(error).__name__}: {error}"
        taken.ended = time.perf_counter()
        return taken

    @property
    def _at(self) -> tuple[str, int]:
        at = urlsplit(self.url)
        return str(at.hostname), at.port or 80

    def _request(self, asked: Asked) -> bytes:
        fields = {
            "model": self.model, "prompt": asked.prompt, "max_tokens": asked.new, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 0, **self.extra,
        }  # fmt: skip
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer none\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


_Parts = list[tuple[float, bytes]]  # of an answer, and when each came


class _Answer(asyncio.BufferedProtocol):
    """`ended`: when the server has closed the connection."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self.ended, self.parts = ended, _Parts()
        self._buffer = memoryview(bytearray(1 << 16))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.parts.append((time.perf_counter(), bytes(self._buffer[:nbytes])))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        if exc:
            self.ended.set_exception(exc)
        else:
            self.ended.set_result(None)


def _lines(parts: _Parts) -> Iterator[tuple[float, bytes]]:
    """Each with the moment at which its last byte came."""
    rest = b""
    for when, part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield when, line
    if rest:
        yield parts[-1][0], rest


def _read(parts: _Parts, taken: Taken, new: int) -> None:
    """All that a server said. Raises ValueError and KeyError for what is no whole answer."""
    if b" 200 " not in b"".join(part for _, part in parts).partition(b"\r\n")[0]:
        raise ValueError(b"".join(part for _, part in parts)[:300].decode("utf-8", "replace"))
    last = b""
    for when, line in _lines(parts):
        if line.startswith(b"data: {"):
            last = line
            if b'"error":' in line:
                raise ValueError(line.decode())
            if _TEXT.search(line):
                taken.pieces.append(when)
    told = json.loads(last[len(b"data: ") :])
    usage = told.get("usage") or {}
    if not usage and told["choices"][0]["finish_reason"] != "length":
        raise ValueError(f"a text ended early: {told['choices'][0]['finish_reason']}")
    taken.prompt_tokens = usage.get("prompt_tokens", 0)
    taken.new_tokens = usage.get("completion_tokens", new)
    taken.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def closed(ask: Callable[[Asked], Awaitable[Taken]], asked: Sequence[Asked], at_once: int) -> list[Taken]:
    """As many users as `at_once`; each sends its next when the one before is whole."""
    left, taken = list(reversed(asked)), list[Taken]()

    async def user() -> None:
        while left:
            taken.append(await ask(left.pop()))

    await asyncio.gather(*(user() for _ in range(at_once)))
    return taken


async def opened(ask: Callable[[Asked], Awaitable[Taken]], asked: Sequence[Asked]) -> list[Taken]:
    """Each when its time has come, whatever became of those before."""

    async def one(each: Asked) -> Taken:
        await asyncio.sleep(each.at)
        return await ask(each)

    return await asyncio.gather(*map(one, asked))


def summary(taken: Sequence[Taken], bounds: dict[str, float] | None = None) -> dict[str, Any]:
    """Rates over the whole of it, percentiles, failures. `bounds`: of first_s and per_token_s, for goodput."""
    good = [each for each in taken if not each.failed]
    seconds = max(each.ended for each in taken) - min(each.sent for each in taken)
    new, read = sum(each.new_tokens for each in good), sum(each.prompt_tokens for each in good)
    found: dict[str, Any] = {
        "seconds": seconds,
        "requests": len(taken),
        "failed": len(taken) - len(good),
        "requests_s": len(good) / seconds,
        "new_tok_s": new / seconds,
        "total_tok_s": (new + read) / seconds,
        "cached_tokens": sum(each.cached_tokens for each in good),
        "first_s": percentiles([each.first_s for each in good]),
        "gap_s": percentiles([gap for each in good for gap in each.gaps_s]),
        "per_token_s": percentiles([each.per_token_s for each in good]),
        "whole_s": percentiles([each.ended - each.sent for each in good]),
    }
    if bounds:
        met = [each for each in good if all(getattr(each, name) <= most for name, most in bounds.items())]
        found["goodput_s"] = len(met) / seconds
    return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that so many of a hundred do not exceed."""
    ordered = sorted(values)
    return {f"p{p}": ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)] for p in (50, 90, 99) if ordered}
