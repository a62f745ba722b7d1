"""PagedBatch: a Batch on a GPU, as kernels read it: every array of it is a tensor there, copied over in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.engine.batch import Batch

Int32 = NDArray[np.int32]
A = TypeVar("A", Int32, Tensor)

_TILE = 64  # rows of a program of attention: query heads that share a key head, of several tokens
_UNSPLIT = 32  # of one where all batches are dealt out alike
_SPLIT = 64  # keys of a program where each run is one token, at least
_SPLITS = 32  # programs that share the keys of a long text


@dataclass(frozen=True)
class Tiling:
    """How the rows and keys of a batch are dealt out to programs of attention."""

    rows: int  # of a tile, a power of two
    queries: int  # tokens of a tile
    chunk: int  # keys of a split; where there is one, as far as they may reach
    splits: int
    alike: bool = False  # whether one piece of code is to see to all keys: what is fused in it decides last bits

    @property
    def reach(self) -> int:
        """Positions that rows may see."""
        return self.chunk * self.splits

    @classmethod
    def of(cls, decodes: bool, group: int, furthest: int, *, invariant: bool = False) -> Tiling:
        """`decodes`: whether each run is one token. `group`: query heads that share a key head. `invariant`: the same
        for every batch, so that no row's sums depend on it."""
        if invariant:
            rows = max(_UNSPLIT, 1 << (group - 1).bit_length())
            return cls(rows, rows // group, max(_SPLIT, 1 << furthest.bit_length()), 1, True)
        if not decodes:
            rows = max(_TILE, 1 << (group - 1).bit_length())
            return cls(rows, rows // group, 1 << furthest.bit_length(), 1)
        reach = max(_SPLIT, 1 << furthest.bit_length())
        chunk = _SPLIT if reach <= 8 * _SPLIT else max(2 * _SPLIT, reach // _SPLITS)
        return cls(max(16, 1 << (group - 1).bit_length()), 1, chunk, reach // chunk)


@dataclass(frozen=True)
class Room:
    """What a batch takes: T tokens of N runs, of which R rows want logits, with tables of B blocks, in M tiles."""

    tokens: int
    rows: int
    runs: int
    blocks: int
    tiles: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        t, n, m = (self.tokens,), (self.runs,), (self.tiles,)
        return {
            "token_ids": t,
            "positions": t,
            "slots": t,
            "logits_rows": (self.rows,),
            "offsets": (self.runs + 1,),
            "starts": n,
            "tables": (self.runs, self.blocks),
            "tile_runs": m,
            "tile_firsts": m,
        }

    @property
    def size(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def within(self, buffer: A) -> dict[str, A]:
        """Its parts of a buffer of `size` numbers."""
        parts: dict[str, A] = {}
        begin = 0
        for name, shape in self.shapes.items():
            parts[name] = buffer[begin : begin + prod(shape)].reshape(shape)
            begin += prod(shape)
        return parts


@dataclass(frozen=True)
class PagedBatch:
    """All int32. Letters as Room has them."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]: where in the cache each token's key and value go
    logits_rows: Tensor  # [R]
    offsets: Tensor  # [N + 1]
    starts: Tensor  # [N]: the position of each run's first token
    tables: Tensor  # [N, B]
    tile_runs: Tensor  # [M]: whose each tile is
    tile_firsts: Tensor  # [M]: the first of its rows of T
    block_size: int
    furthest: int  # the largest position
    tiling: Tiling

    @classmethod
    def of(
        cls, batch: Batch, block_size: int, group: int, device: torch.device, *, invariant: bool = False
    ) -> PagedBatch:
        """In one copy. Raises ValueError where a run's blocks cannot hold its tokens."""
        lengths, runs = batch.lengths, len(batch.lengths)
        tiling = Tiling.of(len(batch.token_ids) == runs, group, batch.furthest, invariant=invariant)
        tiles = -(-lengths // tiling.queries)
        blocks = np.diff(batch.block_offsets)
        room = Room(len(batch.token_ids), len(batch.logits_rows), runs, int(blocks.max()), int(tiles.sum()))
        host = torch.zeros(room.size, dtype=torch.int32)
        to = room.within(host.numpy())
        lay_out(to, lengths, tiling)
        fill(to, batch, block_size)
        return cls(**room.within(host.to(device)), block_size=block_size, furthest=batch.furthest, tiling=tiling)


def lay_out(to: Mapping[str, Int32], lengths: Int32, tiling: Tiling) -> None:
    """Where runs of these lengths begin, and who sees to which of their tokens."""
    tiles = -(-lengths // tiling.queries)
    to["offsets"][:] = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths)))
    to["tile_runs"][:] = np.repeat(np.arange(len(lengths)), tiles)
    nth = np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)  # of its run
    to["tile_firsts"][:] = to["offsets"][to["tile_runs"]] + nth * tiling.queries


def fill(to: Mapping[str, Int32], batch: Batch, block_size: int) -> None:
    """What differs from one pass to the next of its kind. Where there is room for more runs, they are copies of the
    last, which compute and store the same as it does."""
    runs, tokens = len(batch.offsets) - 1, len(batch.token_ids)
    tables, bounds = to["tables"], batch.block_offsets.tolist()
    for row, begin, end in zip(tables, bounds, bounds[1:], strict=False):
        count = min(end - begin, len(row))
        row[:count] = batch.blocks[begin : begin + count]
    if runs == tokens:  # each a run of its own
        run_of, held, starts = np.arange(runs), np.diff(batch.block_offsets), batch.positions
    else:
        run_of = np.repeat(np.arange(runs), batch.lengths)
        held, starts = np.diff(batch.block_offsets)[run_of], batch.positions[batch.offsets[:-1]]
    block, within = np.divmod(batch.positions, block_size)
    if (block >= held).any():
        raise ValueError(f"a run's blocks of {block_size} cannot hold its tokens")
    to["logits_rows"][: len(batch.logits_rows)] = batch.logits_rows
    to["token_ids"][:tokens], to["positions"][:tokens], to["starts"][:runs] = batch.token_ids, batch.positions, starts
    to["slots"][:tokens] = tables[run_of, block] * block_size + within
    if len(tables) > runs:
        for name in ("token_ids", "positions", "slots", "starts", "tables"):
            to[name][runs:] = to[name][runs - 1]
