"""What generation gives back: chunks while it runs, a Generation when it is done, and what it took."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from pronk import system
from pronk.engine.events import Savings
from pronk.engine.params import FinishReason, SamplingParams


@dataclass(frozen=True)
class Stats:
    """Seconds, tokens per second, and MB (10^6 bytes). A rate is None where there was nothing to take it from."""

    load_s: float
    ttft_s: float  # from the call to the first token, tokenization included
    prefill_tok_s: float | None
    decode_tok_s: float | None
    peak_rss_mb: float | None  # of the whole process since its start
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int = 0  # of the prompt's, known from an earlier text: the rate of prefill is that of the others
    drafted_tokens: int = 0  # guessed ahead, with speculative decoding
    accepted_tokens: int = 0  # of those, the ones that were right: each saved a forward pass


@dataclass(slots=True)  # not frozen: that takes 2 us more, for every token
class Chunk:
    """One step of one sequence. `text` may be empty: half a character or half a stop string is held back."""

    text: str
    token: int | None  # None for the token that ends the text: it is no part of it
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities
    request: int = 0  # which prompt of a list
    index: int = 0  # which of a prompt's samples
    finish_reason: FinishReason | None = None  # on a sequence's last chunk, as are:
    stats: Stats | None = None
    seed: int = 0
    score: float | None = None
    truncated_tokens: int = 0  # how many of the prompt's were cut on request
    error: Exception | None = None  # why a sequence could not go on, where the finish_reason is "error"
    stop: str | None = None  # the stop string that ended it; None where a token or the length did


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Generation:
    text: str
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    seed: int
    stats: Stats
    prompt_tokens: int
    truncated_tokens: int = 0  # how many of the prompt's were cut on request
    score: float | None = None  # beam search: sum of log-probabilities over length ** length_penalty


@dataclass
class Stopwatch:
    """Times one sequence."""

    load_s: float
    prompt_tokens: int
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    drawn: int = 0  # with the one that ended the text, which took as long as any other
    savings: Savings = field(default_factory=Savings)

    def token(self, *, counts: bool) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.tokens += counts
        self.drawn += 1

    def stats(self) -> Stats:
        ttft, decode = self.first - self.begun, self.last - self.first
        return Stats(
            load_s=self.load_s,
            ttft_s=ttft,
            prefill_tok_s=(self.prompt_tokens - self.savings.cached_tokens) / ttft if ttft > 0 else None,
            decode_tok_s=(self.drawn - 1) / decode if decode > 0 else None,
            peak_rss_mb=None if (peak := system.peak_memory()) is None else peak / 1e6,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.tokens,
            **asdict(self.savings),
        )


def joined(chunks: list[Chunk], prompt: tuple[list[int], int], params: SamplingParams) -> Generation:
    """All chunks of one sample; `prompt`: its token ids, and how many were cut."""
    last = chunks[-1]
    if last.finish_reason is None or last.stats is None:
        raise RuntimeError("the scheduler lost a sequence before its end")
    return Generation(
        text="".join(c.text for c in chunks),
        tokens=[c.token for c in chunks if c.token is not None],
        finish_reason=last.finish_reason,
        logprobs=None if params.logprobs is None else _logprobs(chunks),
        seed=last.seed,
        stats=last.stats,
        prompt_tokens=len(prompt[0]),
        truncated_tokens=prompt[1],
        score=last.score,
    )


def _logprobs(chunks: list[Chunk]) -> list[TokenLogprob]:
    return [TokenLogprob(c.token, c.logprob, c.top) for c in chunks if c.token is not None and c.logprob is not None]
