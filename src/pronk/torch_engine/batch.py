"""TorchBatch: a Batch on a device, with what attention needs to know of every run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from pronk.engine.batch import Batch


@dataclass(frozen=True)
class Rows:
    """Rows [begin, end) of a batch: the tokens at positions [start, start + end - begin) of one sequence."""

    begin: int
    end: int
    start: int
    slots: slice | Tensor | None  # where in the KV storage positions 0.. of the sequence are; None without a cache
    prefix: tuple[int, int] | None = None  # without a cache: the rows of the batch at positions [0, start)

    @cached_property
    def mask(self) -> Tensor:
        """True where a query may look at a key, [queries, keys]: aligned at the ends."""
        queries = self.end - self.begin
        keys = self.start + queries
        return torch.ones(queries, keys, dtype=torch.bool).tril(self.start)


@dataclass(frozen=True)
class TorchBatch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    logits_rows: Tensor  # [R] int64
    runs: tuple[Rows, ...]
    slots: Tensor | None  # [T] int64: where in the KV storage each token's key and value go
    furthest: int  # the largest position

    @classmethod
    def of(cls, batch: Batch, device: torch.device, block_size: int | None) -> TorchBatch:
        """`block_size` None: the cache-free path, on which every run starts at position 0 (ValueError otherwise)."""
        runs, written, tables = [], [], batch.tables
        for n, (begin, end) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
            start = int(batch.positions[begin])
            if block_size is None:
                if start:
                    raise ValueError(f"run {n} starts at position {start}, but there is no cache to hold those before")
                runs.append(Rows(begin, end, 0, None))
                continue
            slots = _slots(tables[n], block_size, start + end - begin)
            written.append(slots[start:])
            runs.append(Rows(begin, end, start, _as_slice_if_contiguous(slots, device)))

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

        return cls(
            token_ids=tensor(batch.token_ids),
            positions=tensor(batch.positions),
            logits_rows=tensor(batch.logits_rows),
            runs=tuple(runs),
            slots=tensor(np.concatenate(written)) if written else None,
            furthest=batch.furthest,
        )

    @cached_property
    def bounds(self) -> Tensor:
        """Where runs begin and end, [runs + 1] int32, on the device."""
        places = [0, *(run.end for run in self.runs)]
        return torch.tensor(places, dtype=torch.int32, device=self.token_ids.device)

    @cached_property
    def longest(self) -> int:
        return max(run.end - run.begin for run in self.runs)

    @cached_property
    def alike(self) -> list[list[Rows]]:
        """Runs, of one length and behind one prefix where they stand side by side: without a cache one dense attention
        serves them all."""
        return [list(runs) for _, runs in groupby(self.runs, lambda run: (run.end - run.begin, run.prefix))]


def _slots(blocks: np.ndarray, block_size: int, length: int) -> np.ndarray:
    slots = blocks.astype(np.int64)[:, None] * block_size + np.arange(block_size)
    if slots.size < length:
        raise ValueError(f"{len(blocks)} blocks of {block_size} cannot hold {length} tokens")
    return slots.reshape(-1)[:length]


def _as_slice_if_contiguous(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """A slice reads the storage in place; an index has to gather."""
    if slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)
