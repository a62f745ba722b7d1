"""Load: what a session has to do, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from pronk.engine.events import Counters


@dataclass(frozen=True)
class Load:
    """What a session has to do at the moment, and what it has done since it was made."""

    running: int  # sequences: samples and beams
    waiting: int  # requests
    blocks_used: int  # of the KV cache, by those that run
    blocks_free: int  # and those that hold earlier texts, which make room when it is needed
    new_tokens: int  # generated
    seconds: float  # that the passes took
    counters: Counters  # tokens of prompts, reused, guessed; passes; preemptions: it goes on counting

    @property
    def tokens_s(self) -> float:
        """Tokens generated in a second of passes; 0.0 before the first."""
        return self.new_tokens / self.seconds if self.seconds else 0.0
