"""/v1/completions: https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from pronk.serve.asking import Asked
from pronk.serve.chat import head, last_of
from pronk.serve.engine import Engine
from pronk.serve.failures import ApiError, amid
from pronk.serve.http import DONE, Chunks, event
from pronk.serve.requests import CompletionRequest
from pronk.serve.scores import Scored, scores
from pronk.serve.speech import Account, logprob, speech

if TYPE_CHECKING:
    from pronk.engine.generation import Chunk
    from pronk.tokenizer.stream import StreamDecoder

MAX_TOKENS = 16  # where nothing is said, as OpenAI has it
MOST_PROMPTS = 256
REFUSED = {
    "suffix": "cannot be had: LLaMA models continue a text, and fill no gaps",
    "chat_template": "is the server's, never a request's",
    "prompt_embeds": "cannot be had; give text or token ids",
    "messages": "is a chat's, for /v1/chat/completions; a completion takes a prompt",
    "use_beam_search": "is num_beams here",
}


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Text, ids, or a list of either. Raises ApiError."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    several = given if given and isinstance(given[0], str | list) else [given]
    if len(several) > MOST_PROMPTS:
        raise ApiError(400, f"{len(several)} prompts are more than {MOST_PROMPTS}", "prompt")
    for prompt in several:
        ids = isinstance(prompt, list) and all(isinstance(id, int) and not isinstance(id, bool) for id in prompt)
        if not isinstance(prompt, str) and not ids:
            raise ApiError(400, "prompt must be a text, a list of token ids, or a list of either", "prompt")
    return several


class _Choice:
    """One text, and its log-probabilities in the older form."""

    def __init__(self, asked: Asked, index: int, prompt: Sequence[int]) -> None:
        self.asked, self.index, self.text, self.finish = asked, index, [""], ""
        self.tokens: list[str] = []
        self.values: list[float | None] = []
        self.tops: list[dict[str, float] | None] = []
        self.offsets: list[int] = []
        self._at = 0
        if asked.wanted.params.logprobs is not None:
            self._decoder = asked.llm.tokenizer.stream_decoder(previous=prompt)

    def echo(self, scored: Scored, text: str) -> None:
        """The prompt's part; its first token follows nothing, and has no probability."""
        self.text, decoder = [text], self.asked.llm.tokenizer.stream_decoder()
        for token, value, top in zip(scored.ids, scored.logprobs, scored.tops, strict=True):
            first = math.isnan(value)
            self._entry(decoder, token, None if first else value, None if first else top)
        self._at = len(text)

    def echo_as(self, other: _Choice) -> None:
        """The same, of another sample of its prompt."""
        self.text, self._at = [*other.text], other._at
        self.tokens, self.values = [*other.tokens], [*other.values]
        self.tops, self.offsets = [*other.tops], [*other.offsets]

    def add(self, text: str, chunk: Chunk) -> None:
        self.text.append(text)
        if self.asked.wanted.params.logprobs is not None and chunk.token is not None:
            self._entry(self._decoder, chunk.token, chunk.logprob, chunk.top)

    def _entry(
        self, decoder: StreamDecoder, token: int, value: float | None, top: Sequence[tuple[int, float]] | None
    ) -> None:
        text = self.asked.llm.tokenizer.token_text
        spell = (lambda token: f"token_id:{token}") if self.asked.as_ids else text
        self.tokens.append(spell(token))
        self.values.append(None if value is None else logprob(value))
        self.tops.append(None if top is None else {spell(other): logprob(its) for other, its in top})
        self.offsets.append(self._at)
        self._at += len(decoder.feed(token))  # none of a special token, and all of a character with its last part

    def logprobs(self) -> dict[str, Any] | None:
        if self.asked.wanted.params.logprobs is None:
            return None
        found = {
            "tokens": self.tokens,
            "token_logprobs": self.values,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
        }
        self.tokens, self.values, self.tops, self.offsets = [], [], [], []
        return found

    def taken(self, finish: str | None) -> dict[str, Any]:
        text, self.text = "".join(self.text), []
        return {"index": self.index, "text": text, "logprobs": self.logprobs(), "finish_reason": finish}


async def _begin(engine: Engine, asked: Asked, request: CompletionRequest, account: Account) -> list[_Choice]:
    """The choices, with the prompts where these are to be echoed, scored where that is asked for."""
    choices = [
        _Choice(asked, number * asked.samples + sample, prompt)
        for number, prompt in enumerate(asked.wanted.prompts)
        for sample in range(asked.samples)
    ]
    if not request.echo:
        return choices
    engine.reserve(len(choices))
    engine.release(len(choices))  # each prompt takes its place when it is scored
    top = asked.wanted.params.logprobs
    for number, ids in enumerate(asked.wanted.prompts):
        text = asked.llm.tokenizer.decode(ids)
        scored = Scored([], [], []) if top is None else await scores(engine, asked.leased, ids, top)
        first, *others = choices[number * asked.samples : (number + 1) * asked.samples]
        first.echo(scored, text)
        for choice in others:
            choice.echo_as(first)
    if request.max_tokens == 0:
        account.prompt_tokens = sum(map(len, asked.wanted.prompts))
        for choice in choices:
            choice.finish = "length"
    return choices


async def whole(engine: Engine, asked: Asked, request: CompletionRequest) -> dict[str, Any]:
    account = Account()
    choices = await _begin(engine, asked, request, account)
    if request.max_tokens != 0:
        async for pieces in speech(engine, asked, account):
            for piece in pieces:
                choice = choices[piece.index]
                choice.add(piece.chunk.text, piece.chunk)
                choice.finish = piece.finish or ""
    return {
        **head("cmpl", "text_completion", asked),
        "choices": [choice.taken(choice.finish) for choice in choices if choice.finish],
        "usage": account.usage(),
        "pronk": account.besides(asked),
    }


async def stream(
    engine: Engine, asked: Asked, request: CompletionRequest, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    common, account, begun = head("cmpl", "text_completion", asked), Account(), False
    chunks = Chunks(common, {"usage": None} if include_usage else {})

    def chunk(choice: _Choice, finish: str | None, left: int) -> bytes:
        more = last_of(account, asked, include_usage) if not left else {}
        return chunks.event(choice.taken(finish), **more)

    try:
        choices = await _begin(engine, asked, request, account)
        left = len(choices)  # which are not whole
        if request.echo:
            begun, out = True, list[bytes]()
            for choice in choices:
                left -= bool(choice.finish)
                out.append(chunk(choice, choice.finish or None, left))
            yield b"".join(out)
        if request.max_tokens != 0:
            async for pieces in speech(engine, asked, account):
                out = []
                for piece in pieces:
                    choice = choices[piece.index]
                    choice.add(piece.chunk.text, piece.chunk)
                    left -= bool(piece.finish)
                    if piece.finish or piece.chunk.text or choice.tokens:
                        out.append(chunk(choice, piece.finish, left))
                begun = True
                yield b"".join(out)
    except Exception as error:
        if not begun:
            raise
        yield event(amid(error).openai(), "error")
        return
    if include_usage:
        yield event({**common, "choices": [], "usage": account.usage(), "pronk": account.besides(asked)})
    yield DONE
