"""Speech: the chunks of an answer as pieces of text, calls of tools, log-probabilities and accounts, for every API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pronk.engine.generation import Chunk, Stats
from pronk.serve.asking import Asked
from pronk.serve.calls import Call, CallFinder, ForcedCalls
from pronk.serve.engine import Engine
from pronk.serve.failures import about

_NEVER = -9999.0  # a log-probability of what cannot come, which JSON has no number for; OpenAI's own


@dataclass(slots=True)  # not frozen: there is one of each token
class Piece:
    """What came of one sample in one step."""

    index: int  # prompt by prompt, sample by sample
    parts: list[str | Call]  # texts that are not empty, and calls
    chunk: Chunk
    finish: str | None = None  # stop, length or tool_calls


@dataclass
class Account:
    """What an answer took, of all its texts."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seed: int | None = None
    stats: Stats | None = None  # of the text that ended last
    prompts: set[int] = field(default_factory=set)

    def add(self, chunk: Chunk, copies: int) -> None:
        stats = chunk.stats
        if stats is None:
            return
        if chunk.request not in self.prompts:
            self.prompts.add(chunk.request)
            self.prompt_tokens += stats.prompt_tokens
            self.cached_tokens += stats.cached_tokens
        self.new_tokens += stats.new_tokens * copies
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self.seed, self.stats = chunk.seed, stats

    def usage(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
            },
        }

    def besides(self, asked: Asked) -> dict[str, Any]:
        """What OpenAI's form has no place for."""
        stats = self.stats
        found: dict[str, Any] = {"seed": self.seed}
        if stats:
            found |= {
                "first_token_s": round(stats.ttft_s, 6),
                "prompt_tokens_per_s": stats.prefill_tok_s and round(stats.prefill_tok_s, 2),
                "tokens_per_s": stats.decode_tok_s and round(stats.decode_tok_s, 2),
            }
        if asked.cut:
            found["truncated_tokens"] = asked.cut
        return found | _warnings(asked.unheard, asked.notes)


def warned(unheard: Sequence[str], notes: Sequence[str] = ()) -> dict[str, Any]:
    """What an answer that is no text has besides: of fields that nobody heeds, and what else is to be said."""
    found = _warnings(unheard, notes)
    return {"pronk": found} if found else {}


def _warnings(unheard: Sequence[str], notes: Sequence[str]) -> dict[str, list[str]]:
    told = [f"{name} is not a field that this server knows; it changed nothing" for name in unheard]
    return {"warnings": [*told, *notes]} if told or notes else {}


async def speech(engine: Engine, asked: Asked, account: Account) -> AsyncGenerator[list[Piece], None]:
    """Pieces as they come; closing it cancels what is still to come. Raises ApiError and PronkError."""
    texts, begun = asked.wanted.texts * asked.copies, time.perf_counter()
    engine.reserve(texts)
    try:
        with about(None, "logit_bias", "stop_token_ids"):  # whose tokens the model may not have
            answer = await engine.submitted(asked.wanted)
        finders: dict[int, CallFinder | ForcedCalls] = {}
        try:
            async with aclosing(answer.chunks()) as coming:
                async for chunks in coming:
                    if begun:
                        engine.first_token(time.perf_counter() - begun)
                        begun = 0.0
                    yield [piece for chunk in chunks for piece in _pieces(asked, chunk, account, finders)]
        finally:
            engine.cancel(answer)
    finally:
        engine.release(texts)


def _pieces(asked: Asked, chunk: Chunk, account: Account, finders: dict[int, CallFinder | ForcedCalls]) -> list[Piece]:
    account.add(chunk, asked.copies)
    found = []
    for copy in range(asked.copies):
        index = chunk.request * asked.samples + (copy if asked.copies > 1 else chunk.index)
        parts: list[str | Call] = [chunk.text] if chunk.text else []
        finish: str | None = chunk.finish_reason
        if asked.tools:
            kind = ForcedCalls if asked.tools.forced else CallFinder
            finder = finders.setdefault(index, kind(asked.tools))
            parts = finder.feed(chunk.text, chunk.finish_reason is not None)
            if finish == "stop" and finder.whole:
                finish = "tool_calls"
        found.append(Piece(index, parts, chunk, finish))
    return found


def entries_of(asked: Asked, chunk: Chunk) -> list[dict[str, Any]]:
    """Log-probabilities in the form of OpenAI's chat: none of the token that ends a text, for it is no part of it."""
    if asked.wanted.params.logprobs is None or chunk.token is None:
        return []
    tokenizer = asked.llm.tokenizer

    def entry(token: int, value: float | None) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token)
        text = f"token_id:{token}" if asked.as_ids else spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob(value), "bytes": list(spelled)}

    tops = [entry(token, value) for token, value in chunk.top]
    return [{**entry(chunk.token, chunk.logprob), "top_logprobs": tops}]


def logprob(value: float | None) -> float:
    return _NEVER if value is None or value < _NEVER else value
