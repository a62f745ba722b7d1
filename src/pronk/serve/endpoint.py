"""Endpoint: a path's handler, whose errors become answers, and whose answer a line of the log and a count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pronk.serve.engine import Engine
from pronk.serve.failures import ApiError, log_failure, of
from pronk.serve.http import EventStream, Gone, Json


class Endpoint:
    """A handler, whose errors become answers, and whose answer a line of the log and a count."""

    def __init__(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[Any]],
        methods: Sequence[str],
        engine: Engine,
        note: Callable[[str, Scope, int, float], None],
    ) -> None:
        self._path, self._handler, self._methods = path, handler, methods
        self._engine, self._note = engine, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status = time.perf_counter(), 200
        answer: Any
        try:
            if scope["method"] not in (*self._methods, *["HEAD"] * ("GET" in self._methods)):
                said = f"{scope['method'][:20]} is not for {self._path}; {' and '.join(self._methods)} is"
                raise ApiError(405, said, headers={"Allow": ", ".join(self._methods)})
            answer = await self._handler(Request(scope, receive))
        except Gone:
            self._note(self._path, scope, 499, begun)
            return
        except asyncio.CancelledError:  # all of them, when the server ends at once
            if not self._engine.draining:
                raise
            told = _cut()
            answer = Json(told.told(scope["path"]), told.status, told.headers)
        except Exception as error:
            told = of(error)
            status = told.status
            if status >= 500 and not getattr(error, "logged", False):
                log_failure("a request failed", error)
            answer = Json(told.told(scope["path"]), status, told.headers)
        status = getattr(answer, "status_code", 200)
        try:
            await answer(scope, receive, send)
        except asyncio.CancelledError:
            if not self._engine.draining or not isinstance(answer, EventStream):
                raise
            await answer.cut(send, _cut())
        self._note(self._path, scope, 499 if getattr(answer, "left", False) else status, begun)


def _cut() -> ApiError:
    return ApiError(503, "the server has ended amid this answer")
