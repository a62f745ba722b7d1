"""/v1/look: llm.look over HTTP. The last looks are kept: attention or lens of a token then cost one token's pass."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pronk.engine.params import SamplingParams
from pronk.errors import PronkError
from pronk.serve import asking
from pronk.serve.engine import Engine, Wanted
from pronk.serve.failures import ApiError, about
from pronk.serve.models import Leased
from pronk.serve.requests import LookRequest

if TYPE_CHECKING:
    from pronk.llm import LLM
    from pronk.look import Look

MOST_TOKENS = 4096  # of one look: its keys and values are kept with it
MOST_KEPT_TOKENS = 8192  # of all
MOST_KEPT = 8
PAGE, MOST_PAGE = 256, 1024  # tokens of one answer
_ROWS = 32  # tokens that are read at a time: a pass of others waits no longer than for these
_MOST_SHARED = 256  # tokens of a text each of whose passes is over all of it


@dataclass(frozen=True)
class _Kept:
    owner: int  # of whose key it is
    model: str
    llm: LLM
    look: Look


class Looks:
    """In the event loop. One look is computed at a time, piece by piece, between the passes of others."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[str, _Kept] = {}  # the least recently used first
        self._turn = asyncio.Lock()

    async def answer(self, leased: Leased, request: LookRequest, unheard: list[str]) -> dict[str, Any]:
        """Raises ApiError and PronkError."""
        if unheard:  # the shape is ours: what it has not is a mistake
            raise ApiError(400, f"a look has no {unheard[0][:40]!r}", unheard[0][:40])
        start = request.start or 0
        stop = min(start + PAGE, MOST_TOKENS) if request.stop is None else request.stop
        if not 0 <= start <= stop:
            raise ApiError(400, f"start and stop must be a range of tokens, not {start} and {stop}", "start")
        if stop - start > MOST_PAGE:
            raise ApiError(400, f"at most {MOST_PAGE} tokens are shown at a time, not {stop - start}", "stop")
        self._engine.reserve(1)  # who waits for a turn counts as a text does
        try:
            async with self._turn:
                return await self._answer(leased, request, start, stop)
        finally:
            self._engine.release(1)

    async def _answer(self, leased: Leased, request: LookRequest, start: int, stop: int) -> dict[str, Any]:
        self._kept = {name: kept for name, kept in self._kept.items() if _is_open(kept.llm)}
        if request.look is None:
            look = await self._taken(leased, request)
            name = self._keep(_Kept(leased.owner, leased.name, leased.llm, look))
        else:
            name, look = request.look, self._found(leased, request)
        found: dict[str, Any] = {"id": name, "object": "look", "created": int(time.time()), "model": leased.name}
        found |= await asyncio.to_thread(look.to_dict, min(start, len(look)), min(stop, len(look)))
        if row := request.attention:
            with about("attention"):
                weights = await self._engine.call(lambda: look.attention(row.token, row.layer, row.head))
            found["attention"] = {"token": row.token, "layer": row.layer, "head": row.head, "weights": weights.tolist()}
        if through := request.lens:
            with about("lens"):
                lens = await self._engine.call(lambda: look.lens(through.token, through.k))
            found["lens"] = lens.to_dict()
        return found

    async def _taken(self, leased: Leased, request: LookRequest) -> Look:
        """A new one, read to its end."""
        if (request.text is None) == (request.messages is None):
            raise ApiError(400, "give a text, or messages", "text" if request.messages is None else "messages")
        if request.answer is not None and request.max_tokens is not None:
            raise ApiError(400, "an answer is looked at as it is; leave max_tokens out", "max_tokens")
        if request.max_tokens is not None and not 1 <= request.max_tokens <= MOST_TOKENS:
            raise ApiError(400, f"max_tokens must be from 1 to {MOST_TOKENS}, not {request.max_tokens}", "max_tokens")
        llm = leased.llm
        asked: Any = asking.conversation(request.messages) if request.messages is not None else request.text
        field = "text" if request.messages is None else "messages"
        await asyncio.to_thread(asking.check_length, llm, [asked, request.answer], field)
        options: dict[str, Any] = {"adapter": leased.name if leased.adapter else None}
        if request.top is not None:
            options["top"] = request.top

        with about(field, "top", "answer"):
            look = await asyncio.to_thread(llm.look, asked, answer=request.answer, **options)
        _check_length(len(look) + (request.max_tokens or 0))
        if request.max_tokens:
            ids = look.ids.tolist()
            look = await asyncio.to_thread(
                llm.look, asked, answer=await self._continued(leased, ids, request.max_tokens), **options
            )
        if llm.backend.shares_scales and len(look) > _MOST_SHARED:
            problem = f"tokens of this model share scales, so that a look at more than {_MOST_SHARED} cannot be had"
            raise ApiError(400, f"{problem}; this text has {len(look)}", "text")
        self._make_room(len(look))
        while await self._engine.call(lambda: look.read(_ROWS)):
            pass
        return look

    async def _continued(self, leased: Leased, ids: list[int], max_tokens: int) -> list[int]:
        """The tokens that the model goes on with, greedily."""
        prompt, _ = leased.llm.fitted(ids, params := SamplingParams(max_new_tokens=max_tokens))
        wanted = Wanted(leased.session, [prompt], params, leased.adapter, None, leased.owner)
        answer = await self._engine.submitted(wanted)
        try:
            return [chunk.token async for chunks in answer.chunks() for chunk in chunks if chunk.token is not None]
        finally:
            self._engine.cancel(answer)

    # -- what is kept --

    def _keep(self, kept: _Kept) -> str:
        name = f"look-{secrets.token_urlsafe(18)}"
        self._kept[name] = kept
        return name

    def _found(self, leased: Leased, request: LookRequest) -> Look:
        """Raises ApiError where there is none of that name, or none of this owner's: which, nobody is told."""
        for name in ("text", "messages", "answer", "max_tokens", "top"):
            if getattr(request, name) is not None:
                raise ApiError(400, f"a look that was taken before is as it is; leave {name} out", name)
        kept = self._kept.get(request.look or "")
        if kept is None or kept.owner != leased.owner:
            raise ApiError(404, "there is no such look, or it was let go; look again", "look", "look_not_found")
        if kept.model != leased.name:
            raise ApiError(400, f"that look is at a text of the model {kept.model!r}; name it", "model")
        assert request.look
        self._kept[request.look] = self._kept.pop(request.look)
        return kept.look

    def _make_room(self, tokens: int) -> None:
        """For one more, so that with it no bound is exceeded."""
        while self._kept and (
            len(self._kept) >= MOST_KEPT
            or sum(len(kept.look) for kept in self._kept.values()) + tokens > MOST_KEPT_TOKENS
        ):
            del self._kept[next(iter(self._kept))]


def _is_open(llm: LLM) -> bool:
    """Whether it was not unloaded meanwhile."""
    try:
        return llm.backend is not None
    except PronkError:
        return False


def _check_length(tokens: int) -> None:
    if tokens > MOST_TOKENS:
        problem = f"a look is at {MOST_TOKENS} tokens at most, and this is at {tokens}"
        raise ApiError(400, problem, "text", "context_length_exceeded")
