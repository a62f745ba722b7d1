"""Handle: one request of a session, from when it is asked for to its last chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pronk.engine.generation import Chunk
from pronk.engine.params import FinishReason, SamplingParams
from pronk.engine.sequence import Request
from pronk.engine.streaming import TextStream

if TYPE_CHECKING:
    from pronk.engine.backend import Attached
    from pronk.engine.planner import Entry
    from pronk.session.reader import Reader


@dataclass(eq=False)
class Handle:
    """One request of a session."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    request: Request
    number: int  # which its chunks say that they are of
    begun: float  # time.perf_counter()
    left: int  # samples that have not ended
    reader: Reader = field(repr=False)
    streams: dict[int, TextStream] = field(default_factory=dict)  # by sample, from its first token on
    ended: set[int] = field(default_factory=set)  # samples that have
    cancelled: bool = False  # and nobody was told yet
    entry: Entry | None = None  # what the scheduler has made of it
    adapter: Attached | None = None  # held: it stays while the request needs it

    @property
    def read(self) -> int:
        """Tokens of the prompt that are computed."""
        return min(self.entry.parts[0].computed, len(self.prompt)) if self.entry else 0

    @property
    def waits(self) -> bool:
        """Whether no pass has read any of it."""
        return not (self.read or self.streams)

    @property
    def steps(self) -> tuple[int, int]:
        """How many tokens were generated, of each sample or beam, and how many there may be."""
        limit = self.request.max_tokens - len(self.prompt)
        return (self.entry.step if self.left and self.entry else limit), limit

    def failed(self, error: Exception, sample: int = 0) -> Chunk:
        return self._last(sample, "error", error)

    def cut_off(self) -> list[Chunk]:
        """The last chunks of all samples that had not ended when it was cancelled."""
        return [self._last(sample, "cancelled") for sample in range(self.params.samples) if sample not in self.ended]

    def _last(self, sample: int, reason: FinishReason, error: Exception | None = None) -> Chunk:
        watch = self.streams[sample].watch if sample in self.streams else None
        stats = watch.stats() if watch and watch.drawn else None
        return Chunk(
            "", None, request=self.number, index=sample, finish_reason=reason, stats=stats, seed=self.seed, error=error
        )
