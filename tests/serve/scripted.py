"""The page beside a server whose answers are written beforehand: hostile ones, and ones that are very long."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from pronk.serve import page
from pronk.serve import run as serving

Said = Callable[[str], str]  # from the last question to the answer


def long_answer(tokens: int) -> str:
    """Of about that many: prose, lists, code and tables, as models write them."""
    part = (
        "## Part {n}\n\nThe **sea** is *salt* water, and `salt(n)` says how much of it: see [a chart](https://example.org).\n\n"
        "1. First the rain falls on stone\n2. then the rivers carry what it took\n   - chalk\n   - iron\n\n"
        "```python\ndef salt(n):\n    return [depth * 0.035 for depth in range(n)]\n```\n\n"
        "| depth | salt |\n|---|---|\n| {n} | 3.5 % |\n\n> Nobody drinks it.\n\n"
    )
    found, n = "", 0
    while len(pieces(found)) < tokens:
        n += 1
        found += "".join(part.format(n=n + more) for more in range(20))
    return "".join(pieces(found)[:tokens])


def pieces(text: str) -> list[str]:
    """Tokens, more or less."""
    return re.findall(r" ?\w{1,6}|\n|\s|[^\w\s]", text)


class Scripted:
    """`per_event`, `pause_s`: tokens of an event, and the time between two."""

    def __init__(self, said: Said, per_event: int = 4, pause_s: float = 0.002) -> None:
        self._said, self._per_event, self._pause_s = said, per_event, pause_s
        bound = serving.listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        routes = [
            *page.routes(),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([bound])))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def die(self) -> None:
        """Amid answers, whose connections break off."""
        self._server.force_exit = True
        self.stop()

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _chat(self, request: Request) -> StreamingResponse:
        asked = await request.json()
        return StreamingResponse(
            self._events(self._said(asked["messages"][-1]["content"])), media_type="text/event-stream"
        )

    async def _events(self, text: str) -> AsyncIterator[str]:
        found = pieces(text)
        for at in range(0, len(found), self._per_event):
            some = found[at : at + self._per_event]
            choice = {"index": 0, "delta": {"content": "".join(some)}, "finish_reason": None}
            yield self._event({**choice, "logprobs": {"content": [_entry(at + n, one) for n, one in enumerate(some)]}})
            await asyncio.sleep(self._pause_s)
        yield self._event({"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None})
        yield "data: [DONE]\n\n"

    @staticmethod
    def _event(choice: object) -> str:
        return f"data: {json.dumps({'choices': [choice]})}\n\n"


def _entry(at: int, piece: str) -> dict[str, object]:
    def one(id_: int, text: str, p: float) -> dict[str, object]:
        return {"token": f"token_id:{id_}", "bytes": list(text.encode()), "logprob": math.log(p)}

    others = [one(1000 + n, f" other{n}", 0.1 / (n + 1)) for n in range(4)]
    mine = one(at % 997, piece, (0.9, 0.5, 0.2, 0.02)[at % 4])
    return {**mine, "top_logprobs": [mine, *others]}
