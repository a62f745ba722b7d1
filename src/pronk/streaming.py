"""TextStream: the tokens of one sequence made into chunks of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pronk.generation import Chunk, Stopwatch
from pronk.stopping import StopStrings

if TYPE_CHECKING:
    from pronk.engine.events import Event
    from pronk.tokenizer import Tokenizer


class TextStream:
    """`tokenizer` None: tokens flow, and every text is empty. `prompt_ids` decide on a space at the beginning."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], stop: Sequence[str], watch: Stopwatch
    ) -> None:
        self.decoder = tokenizer.stream_decoder(previous=prompt_ids) if tokenizer else None
        self.stops, self.watch = StopStrings(stop), watch

    def chunk(self, event: Event) -> Chunk:
        """Its `finish_reason` is "stop" although the event's is not, when a stop string has just been completed."""
        reason, ends = event.finish_reason, event.is_stop_token
        self.watch.token(counts=not ends)
        self.watch.savings = event.savings
        text = self._feed(event.token, ends=ends, last=reason is not None)
        if self.stops.found:
            reason = "stop"
        return Chunk(
            text=text,
            token=None if ends else event.token,
            logprob=event.logprob,
            top=event.top,
            finish_reason=reason,
            stats=self.watch.stats() if reason else None,
        )

    def _feed(self, token: int, *, ends: bool, last: bool) -> str:
        if self.decoder is None:
            return ""
        text = "" if ends else self.decoder.feed(token)
        text = self.stops.feed(text + self.decoder.flush() if last else text)
        return text + self.stops.flush() if last else text
