"""TextStream: the tokens of one sequence made into chunks of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pronk.engine.events import Event, Hypothesis, Savings
from pronk.engine.generation import Chunk, Stopwatch
from pronk.engine.stopping import StopStrings

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer


class TextStream:
    """`tokenizer` None: tokens flow, and every text is empty. `prompt_ids` decide on a space at the beginning.

    `request`, `index` and `seed` are those of its chunks.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        watch: Stopwatch,
        *,
        request: int,
        index: int,
        seed: int,
    ) -> None:
        self.decoder = tokenizer.stream_decoder(previous=prompt_ids) if tokenizer else None
        self.stops, self.watch = StopStrings(stop), watch
        self._request, self._index, self._seed = request, index, seed
        self.done, self.given = False, 0  # whether it has come to its end; chunks that its reader has

    def chunk(self, event: Event) -> Chunk:
        """Its `finish_reason` is "stop" although the event's is not, when a stop string has just been completed."""
        reason, ends = event.finish_reason, event.is_stop_token
        self.watch.token(counts=not ends)
        self.watch.savings = event.savings
        text = self._feed(event.token, ends=ends, last=reason is not None)
        if self.stops.found:
            reason = "stop"
        self.done = reason is not None
        return Chunk(
            text=text,
            token=None if ends else event.token,
            logprob=event.logprob,
            top=event.top,
            request=self._request,
            index=self._index,
            finish_reason=reason,
            stop=self.stops.found,
            stats=self.watch.stats() if reason else None,
            seed=self._seed,
        )

    def hypothesis(self, found: Hypothesis, savings: Savings) -> Iterator[Chunk]:
        """What a beam search has found: all tokens at once, so that there is no first one before the last."""
        for step, token in enumerate(found.tokens):
            reason = found.finish_reason if step == len(found.tokens) - 1 else None
            chunk = self.chunk(Event(self._request, self._index, step, token, None, (), reason, savings))
            if chunk.stats:
                rate = chunk.stats.new_tokens / chunk.stats.ttft_s
                chunk = replace(chunk, stats=replace(chunk.stats, prefill_tok_s=None, decode_tok_s=rate))
            yield replace(chunk, score=found.score)

    def _feed(self, token: int, *, ends: bool, last: bool) -> str:
        if self.decoder is None:
            return ""
        text = "" if ends else self.decoder.feed(token)
        text = self.stops.feed(text + self.decoder.flush() if last else text)
        return text + self.stops.flush() if last else text
