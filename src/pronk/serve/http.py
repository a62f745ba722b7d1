"""HTTP: bodies within limits, answers that end when the client leaves, connections that end when it dawdles."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import h11
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pronk.serve.failures import ApiError

T = TypeVar("T")

MAX_BODY = 32 << 20  # bytes
MUCH = 1 << 16  # bytes of a body, or numbers of a list, that are not read in the event loop
HEADERS_S = BODY_S = 30.0  # seconds in which a request's headers, and then its body, must be whole
PING_S = 15.0  # seconds of silence after which a stream says that it lives: proxies cut what is silent for a minute
SEND_S = 60.0  # seconds for which a client may read nothing
_CHUNK = "pronk.chunk"  # of a scope's extensions
_FIRST_S = 10.0  # seconds for which a stream's status waits for its first event
encode = msgspec.json.Encoder(enc_hook=str).encode


class Gone(Exception):
    """The client has left."""


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for the end of headers, and for ever for a client that does not read what was
    sent to it, streamed or whole."""

    _slow: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(HEADERS_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._slow is None and self.conn.their_state is h11.IDLE:
            self._watch(HEADERS_S)
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is before:
            return
        self._unwatch()
        if self.scope["http_version"] == "1.1":  # whose answers of no length are in chunks
            self.scope["extensions"] = {_CHUNK: {"send": self._chunk}}  # before the task that was made for it begins

    def _chunk(self, body: bytes) -> bool:
        """Send a piece of an answer that has begun, in one write. A token of a stream takes a quarter of what it would
        through ASGI and h11, whose state a chunk does not change. False: it is to go that way, and to wait."""
        if self.flow.write_paused or self.transport.is_closing() or not body:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the request was answered before its body went wrong
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.our_state is h11.DONE:  # and the request is not whole: a rest that nobody reads any more
            self._watch(BODY_S)

    def _watch(self, seconds: float) -> None:
        self._slow = self.loop.call_later(seconds, self.transport.abort)

    def _unwatch(self) -> None:
        if self._slow:
            self._slow.cancel()
            self._slow = None

    def _watch_reader(self, left: int | None = None) -> None:
        """`left`: bytes that waited when it was looked at before. Whoever has taken some of them since goes on."""
        waiting = self.transport.get_write_buffer_size() + _unsent(self.transport)
        if left is not None and waiting >= left:
            self.transport.abort()  # without waiting for what it has not taken
            return
        self._unread = self.loop.call_later(SEND_S, self._watch_reader, waiting)

    def _taken(self) -> None:
        if self._unread:
            self._unread.cancel()
            self._unread = None


def _unsent(transport: asyncio.Transport) -> int:
    """Bytes that the system holds for the client, megabytes where it reads slowly; 0 where it does not tell."""
    try:
        import fcntl
        import termios

        held = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except (ImportError, AttributeError, OSError):
        return 0
    return int.from_bytes(held, sys.byteorder)


async def body_of(receive: Receive, headers: Mapping[str, str], limit: int = MAX_BODY) -> bytes:
    """Raises ApiError for one that is too long or too slow, and Gone."""
    too_long = ApiError(413, f"the body is larger than the {limit >> 20} MiB that this server takes")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_long
    body = bytearray()
    until = time.monotonic() + BODY_S
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except asyncio.TimeoutError:
            problem = f"the body was not whole after {BODY_S:.0f} s"
            raise ApiError(408, problem, headers={"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise Gone
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_long
        if not message.get("more_body"):
            return bytes(body)


async def aside(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """What `function` gives; of much in a thread of its own, for a list of a million numbers holds up all streams."""
    return function(*arguments) if size < MUCH else await asyncio.to_thread(function, *arguments)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; where the client leaves first, it is cancelled. Raises Gone."""
    gone = asyncio.ensure_future(_gone(receive))
    try:
        return await _unless(gone, work)
    finally:
        await _ended(gone)


async def _unless(gone: asyncio.Future[None], work: Awaitable[T]) -> T:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        await _ended(task)


async def _ended(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(task, return_exceptions=True)


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class EventStream:
    """Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html

    `events` is closed when the client leaves, or reads nothing for a while. `failed` makes the event that tells of
    what was wrong before the first one, and after the status had gone out. `held` is let go when all has ended.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], failed: Callable[[Exception], bytes], held: AsyncExitStack
    ) -> None:
        self._events, self._failed, self._held = events, failed, held
        self._first = asyncio.ensure_future(anext(events))
        self._chunk: Callable[[bytes], bool] = lambda body: False
        self._since, self._sending = time.monotonic(), False
        self.left = False  # the client, before all was sent
        self._whole = False

    async def begin(self, receive: Receive) -> EventStream:
        """Wait a while for the first event, so that what is wrong until then has a status. Raises that, and Gone."""
        self._gone = asyncio.ensure_future(_gone(receive))
        try:
            both = (self._first, self._gone)
            await asyncio.wait(both, timeout=_FIRST_S, return_when=asyncio.FIRST_COMPLETED)
            if self._first.done():
                if error := self._first.exception():
                    raise error
            elif self._gone.done():
                raise Gone
        except BaseException:
            await self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        watchdog = asyncio.ensure_future(self._watch(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            self._chunk = scope.get("extensions", {}).get(_CHUNK, {}).get("send", self._chunk)
            try:
                await _unless(self._gone, self._send(send))
            except Gone:
                self.left = True
        finally:
            watchdog.cancel()
            await self._close()

    async def _send(self, send: Send) -> None:
        try:
            first = await self._first
        except StopAsyncIteration:
            pass
        except Exception as error:
            await self._put(send, self._failed(error))
        else:
            await self._put(send, first)
            async for event in self._events:
                await self._put(send, event)
        await self._put(send, b"", more=False)

    async def cut(self, send: Send, error: Exception) -> None:
        """Tell whoever reads why no more will come, and wait for nobody who does not."""
        if self._whole or not self._chunk(self._failed(error)):
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._put(send, b"", more=False), 1.0)

    async def _put(self, send: Send, body: bytes, more: bool = True) -> None:
        if more and self._chunk(body):
            self._since = time.monotonic()
            return
        self._sending, self._since = True, time.monotonic()
        self._whole = not more
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending, self._since = False, time.monotonic()

    async def _watch(self, send: Send) -> None:
        """Beside the stream, for a timer at each event would cost more than the event."""
        while True:
            silent = time.monotonic() - self._since
            if self._sending:  # to who does not read
                await asyncio.sleep(PING_S)
            elif silent < PING_S:
                await asyncio.sleep(PING_S - silent)
            else:
                await self._put(send, b": ping\n\n")

    async def _close(self) -> None:
        try:
            await _ended(self._gone)
            await _ended(self._first)
            with contextlib.suppress(Exception):
                await self._events.aclose()
        finally:
            await self._held.aclose()


def event(data: Any, name: str | None = None) -> bytes:
    """One event; JSON has no line breaks of its own."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + encode(data) + b"\n\n"


class Chunks:
    """Events that differ in their choices alone: the rest is made into JSON once. `last`: fields behind the choices."""

    def __init__(self, first: dict[str, Any], last: dict[str, Any]) -> None:
        self._before = b"data: " + encode({**first, "choices": []})[:-2]
        self._after = b"]" + _more(last)

    def event(self, choice: dict[str, Any], **more: Any) -> bytes:
        return self._before + encode(choice) + self._after + _more(more) + b"}\n\n"


def _more(fields: dict[str, Any]) -> bytes:
    return b"," + encode(fields)[1:-1] if fields else b""


DONE = b"data: [DONE]\n\n"
