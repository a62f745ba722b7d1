"""Batch: the one shape of work. Prefill, decode, chunks, beams and any mix of them are ragged runs of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Wants = Literal["last", "all", "none"]
PASS_TOKENS = 512  # of one forward pass at most, unless a scheduler is told otherwise


@dataclass(slots=True)
class Run:
    """Consecutive tokens of one sequence: the part of it that one forward pass computes."""

    token_ids: Sequence[int]
    start: int = 0  # position of the first token; those before it are in the KV cache
    blocks: Sequence[int] = ()  # KV blocks of the whole sequence, in order; empty on the cache-free path
    logits: Wants = "last"  # which tokens want logits
    adapter: int | None = None  # which that was attached to the backend; 0: none; None: what it answers with by itself


@dataclass(frozen=True)
class Batch:
    """T tokens of N runs, one run after the other."""

    token_ids: Int32  # [T]
    positions: Int32  # [T], consecutive within a run
    offsets: Int32  # [N + 1], run n is tokens offsets[n]:offsets[n + 1]
    logits_rows: Int32  # [R], ascending indices into T
    blocks: Int32  # N block tables, one after the other; enough blocks for position + 1 tokens each
    block_offsets: Int32  # [N + 1], run n's table is blocks[block_offsets[n]:block_offsets[n + 1]]
    furthest: int  # the largest position
    adapters: tuple[int | None, ...] | None = None  # [N], as runs have them; None: all of them None

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Batch:
        # Lists first: most batches are a token or a few, for which arrays cost more than what they hold.
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        blocks: list[int] = []
        adapters: list[int | None] = []
        offsets, block_offsets = [0], [0]
        for run in runs:
            begin, end = len(tokens), len(tokens) + len(run.token_ids)
            if end == begin:
                raise ValueError("every run of a batch needs at least one token")
            tokens.extend(run.token_ids)
            positions.extend(range(run.start, run.start + end - begin))
            offsets.append(end)
            blocks.extend(run.blocks)
            adapters.append(run.adapter)
            block_offsets.append(len(blocks))
            if run.logits not in ("last", "all", "none"):
                raise ValueError(f"logits must be last, all or none, not {run.logits!r}")
            if run.logits != "none":
                rows.extend(range(begin if run.logits == "all" else end - 1, end))
        if not tokens:
            raise ValueError("a batch needs at least one run")
        return cls(
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            offsets=np.array(offsets, np.int32),
            logits_rows=np.array(rows, np.int32),
            blocks=np.array(blocks, np.int32),
            block_offsets=np.array(block_offsets, np.int32),
            furthest=max(positions),
            adapters=None if adapters.count(None) == len(adapters) else tuple(adapters),
        )

    def adapters_of_runs(self, usual: int) -> list[int] | None:
        """Of each run, `usual` for those that name none; None where none has any."""
        named = [
            usual if adapter is None else adapter for adapter in self.adapters or (None,) * (len(self.offsets) - 1)
        ]
        return named if any(named) else None

    @property
    def lengths(self) -> Int32:
        """How many tokens each run adds, [N]."""
        return np.diff(self.offsets)

    @property
    def tables(self) -> list[Int32]:
        """The block table of each run."""
        return np.split(self.blocks, self.block_offsets[1:-1])
