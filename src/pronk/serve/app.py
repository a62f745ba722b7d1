"""The application: which path is answered by what."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from pronk import __version__
from pronk.serve import asking, chat, completions, messages, page, responses, tokens
from pronk.serve.asking import Asked
from pronk.serve.endpoint import Endpoint
from pronk.serve.engine import Engine
from pronk.serve.failures import ApiError, amid
from pronk.serve.forms import FORMED
from pronk.serve.http import EventStream, Json, aside, body_of, event, while_there
from pronk.serve.looks import MOST_TOKENS, Looks
from pronk.serve.metrics import Metrics
from pronk.serve.models import Models
from pronk.serve.requests import (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    LookRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
    read,
)
from pronk.terminal import shown_in_line

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
log = logging.getLogger("pronk.serve")

_ABSENT = {
    "/v1/embeddings": "embeddings cannot be had: pronk's models continue texts; /v1/completions with echo scores them",
    "/v1/images/generations": "pictures cannot be had: pronk's models write text",
    "/v1/audio/speech": "speech cannot be had: pronk's models write text",
    "/v1/moderations": "moderation cannot be had: pronk's models write text",
}


@dataclass
class Server:
    """What the routes share. `max_samples`: of one prompt."""

    engine: Engine
    models: Models
    max_samples: int
    metrics: Metrics

    # -- routes --

    async def chat(self, request: Request) -> Response | EventStream:
        asked_for, unheard = await _asked(request, ChatRequest, chat.REFUSED)
        usage = chat.check_stream(asked_for.stream, asked_for.stream_options)
        if asked_for.modalities not in (None, ["text"]):
            raise ApiError(400, "modalities can be text alone", "modalities")
        async with AsyncExitStack() as held:
            leased = await held.enter_async_context(self.models.lease(asked_for.model, request.scope["owner"]))
            making = asking.chat(
                leased,
                asked_for.messages,
                asked_for,
                max_tokens=chat.max_tokens_of(asked_for),
                logprobs=chat.logprobs_of(asked_for),
                max_samples=self.max_samples,
                unheard=unheard,
                tools=asked_for.tools,
                tool_choice=asked_for.tool_choice,
                parallel=asked_for.parallel_tool_calls,
                variables=asked_for.chat_template_kwargs,
                begun=asked_for.answer_ids or (),
            )
            asked = await self._made(request, asked_for, making)
            if asked_for.stream:
                return await self._streamed(request, asked, chat.stream(self.engine, asked, usage), held)
            return Json(await while_there(request.receive, chat.whole(self.engine, asked)))

    async def complete(self, request: Request) -> Response | EventStream:
        asked_for, unheard = await _asked(request, CompletionRequest, completions.REFUSED)
        usage = chat.check_stream(asked_for.stream, asked_for.stream_options)
        if asked_for.best_of not in (None, asked_for.n or 1):
            raise ApiError(400, "best_of cannot be had; give n, and choose", "best_of")
        if asked_for.max_tokens == 0 and not asked_for.echo:
            raise ApiError(400, "max_tokens 0 is for echo, which scores the prompt", "max_tokens")
        async with AsyncExitStack() as held:
            leased = await held.enter_async_context(self.models.lease(asked_for.model, request.scope["owner"]))
            making = asking.completion(
                leased,
                await aside(len(asked_for.prompt), completions.prompts_of, asked_for),
                asked_for,
                max_tokens=completions.MAX_TOKENS if asked_for.max_tokens is None else asked_for.max_tokens,
                logprobs=asked_for.logprobs,
                max_samples=self.max_samples,
                unheard=unheard,
                echo=bool(asked_for.echo),
            )
            asked = await self._made(request, asked_for, making)
            if asked_for.stream:
                events = completions.stream(self.engine, asked, asked_for, usage)
                return await self._streamed(request, asked, events, held)
            return Json(await while_there(request.receive, completions.whole(self.engine, asked, asked_for)))

    async def respond(self, request: Request) -> Response | EventStream:
        asked_for, unheard = await _asked(request, ResponsesRequest, responses.REFUSED)
        async with AsyncExitStack() as held:
            leased = await held.enter_async_context(self.models.lease(asked_for.model, request.scope["owner"]))
            making = responses.asked(leased, asked_for, unheard, self.max_samples)
            asked = await self._made(request, asked_for, making)
            if asked_for.stream:
                return await self._streamed(request, asked, responses.stream(self.engine, asked, asked_for), held)
            return Json(await while_there(request.receive, responses.whole(self.engine, asked, asked_for)))

    async def kept_response(self, request: Request) -> Response:
        raise ApiError(404, "there is no such response: this server keeps no answers")

    async def message(self, request: Request) -> Response | EventStream:
        asked_for, unheard = await _asked(request, MessagesRequest, messages.REFUSED)
        async with AsyncExitStack() as held:
            leased = await held.enter_async_context(self.models.lease(asked_for.model, request.scope["owner"]))
            making = messages.asked(leased, asked_for, unheard, self.max_samples)
            asked = await self._made(request, asked_for, making)
            if asked_for.stream:
                return await self._streamed(request, asked, messages.stream(self.engine, asked), held)
            return Json(await while_there(request.receive, messages.whole(self.engine, asked)))

    async def count(self, request: Request) -> Response:
        asked_for, unheard = await _asked(request, CountRequest, messages.REFUSED)
        async with self.models.lease(asked_for.model, request.scope["owner"]) as leased:
            return Json(await self._made(request, asked_for, messages.count(leased, asked_for, unheard)))

    async def tokenize(self, request: Request) -> Response:
        asked_for, unheard = await _asked(request, TokenizeRequest, {})
        async with self.models.lease(asked_for.model, request.scope["owner"]) as leased:
            return Json(await asyncio.to_thread(tokens.tokenize, leased, asked_for, unheard))

    async def detokenize(self, request: Request) -> Response:
        asked_for, unheard = await _asked(request, DetokenizeRequest, {})
        async with self.models.lease(asked_for.model, request.scope["owner"]) as leased:
            return Json(await asyncio.to_thread(tokens.detokenize, leased, asked_for, unheard))

    async def look(self, request: Request) -> Response:
        asked_for, unheard = await _asked(request, LookRequest, {})
        async with self.models.lease(asked_for.model, request.scope["owner"]) as leased:
            looked = self._looks.answer(leased, asked_for, unheard)
            return Json(await while_there(request.receive, looked))

    async def list_models(self, request: Request) -> Response:
        await self.models.forget_dropped()
        return Json({"object": "list", "data": [self._card(name) for name in self.models.names]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.models.names:
            raise self.models.absent(name)
        return Json(self._card(name))

    async def health(self, request: Request) -> Response:
        if self.engine.draining or not self.models.loaded:
            return Json({"status": "ending" if self.engine.draining else "loading"}, 503)
        if not self.engine.alive:  # and requests would wait for ever
            return Json({"status": "failed"}, 503)
        return Json({"status": "ok", "version": __version__})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def describe(self, request: Request) -> Response:
        def made() -> dict[str, Any]:
            from pronk.serve import openapi  # which few ask for, and which takes a while to make

            return openapi.document()

        return Json(await asyncio.to_thread(made))

    async def absent(self, request: Request) -> Response:
        raise ApiError(400, _ABSENT[request.url.path], code="unsupported")

    # -- --

    def note(self, label: str, scope: Scope, status: int, begun: float) -> None:
        """A line of the log, and a count. `label`: a path of ours, for what a client chooses would be a leak."""
        self.metrics.requests.labels(label, str(status)).inc()
        client = (scope.get("client") or ("?",))[0]
        seconds = time.perf_counter() - begun
        log.info("%s %s %s %d %.3fs", client, scope["method"], shown_in_line(scope["path"])[:200], status, seconds)

    def _card(self, name: str) -> dict[str, Any]:
        model = self.models.models.get(name)
        card = {
            "id": name,
            "object": "model",
            "created": model.created if model else self._started,
            "owned_by": "pronk",
        }
        if model and model.llm:
            card["max_model_len"] = model.llm.ctx_size
            card["pronk"] = {**model.shape, "look_tokens": MOST_TOKENS}
        return card

    def __post_init__(self) -> None:
        self._started, self._looks = int(time.time()), Looks(self.engine)

    async def _made(self, request: Request, asked_for: object, making: Coroutine[Any, Any, T]) -> T:
        """What `making` gives. Of a form or tools, whose grammar may take long to make, it is counted among what
        waits, and is not begun where its client has left."""
        if all(getattr(asked_for, name, None) is None for name in FORMED):
            return await making
        try:
            self.engine.reserve(1)
        except ApiError:
            making.close()
            raise
        try:
            return await while_there(request.receive, making)
        finally:
            self.engine.release(1)

    async def _streamed(
        self, request: Request, asked: Asked, events: AsyncGenerator[bytes, None], held: AsyncExitStack
    ) -> EventStream:
        """The model stays held until the stream has ended."""

        def failed(error: Exception) -> bytes:
            return event(amid(error).streamed(request.url.path), "error")

        return await EventStream(events, failed, held.pop_all()).begin(request.receive)


def application(server: Server, on_start: Callable[[], Awaitable[None]]) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.engine.start(asyncio.get_running_loop())
        starting = asyncio.ensure_future(on_start())  # meanwhile /health says so, and requests wait for their model
        yield
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        server.engine.stop()
        server.models.close()

    def route(path: str, handler: Callable[[Request], Awaitable[Any]], *methods: str) -> Route:
        return Route(path, Endpoint(path, handler, methods or ("GET",), server.engine, server.note))

    routes = [
        route("/v1/chat/completions", server.chat, "POST"),
        route("/v1/completions", server.complete, "POST"),
        route("/v1/responses", server.respond, "POST"),
        route("/v1/responses/{id:path}", server.kept_response, "GET", "POST", "DELETE"),
        route("/v1/messages", server.message, "POST"),
        route("/v1/messages/count_tokens", server.count, "POST"),
        route("/v1/models", server.list_models),
        route("/v1/models/{name:path}", server.one_model),
        route("/v1/look", server.look, "POST"),
        route("/tokenize", server.tokenize, "POST"),
        route("/detokenize", server.detokenize, "POST"),
        route("/health", server.health),
        route("/metrics", server.show_metrics),
        route("/openapi.json", server.describe),
        *page.routes(),
        *(route(path, server.absent, "POST", "GET") for path in _ABSENT),
    ]
    known = {found.path for found in routes}

    async def no_such_path(request: Request, error: Exception) -> Response:
        path, status = request.url.path, error.status_code if isinstance(error, HTTPException) else 500
        problem = f"there is nothing at {path[:200]!r}"
        if f"/v1{path}" in known:
            problem += f"; /v1{path} is: end the address that the client is told with /v1"
        elif path.startswith("/v1/") and path.removeprefix("/v1") in known:
            problem += f"; {path.removeprefix('/v1')} is: end the address that the client is told without /v1"
        told = ApiError(status, problem)
        server.note("unknown", request.scope, status, time.perf_counter())
        return Json(told.told(path), status, told.headers)

    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: no_such_path})


async def _asked(request: Request, kind: type[S], refused: Mapping[str, str]) -> tuple[S, list[str]]:
    """What `read` gives."""
    body = await body_of(request.receive, request.headers)
    return await aside(len(body), read, body, kind, refused)
