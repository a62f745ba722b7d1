"""Requests, and the sequences that the scheduler makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from pronk.engine.kv_blocks import BlockTable
from pronk.engine.params import SamplingParams
from pronk.engine.rng import Stream


@dataclass(frozen=True)
class Request:
    id: int
    params: SamplingParams
    prompt_tokens: int
    max_tokens: int  # prompt included
    stop_ids: frozenset[int]
    streams: tuple[Stream, ...]


@dataclass(eq=False)
class Sequence:
    """Samples of one request that are still the same tokens: all of them until the prompt is computed, then one."""

    request: Request
    samples: list[int]
    tokens: list[int]
    table: BlockTable
    computed: int = 0  # the most tokens ever computed

    @property
    def step(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.table.length
