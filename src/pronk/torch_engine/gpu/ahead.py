"""Ahead: the pass after this one, begun before this one's tokens have reached the host.

Starting a graph and reading a token cost the host half a millisecond and more, in which a GPU that waits for the token
does nothing. Where texts have gone on by their likeliest tokens for some passes, they likely do once more: the next
pass takes its tokens from this one's, on the device. Should something else be asked for, what it wrote is written over:
keys and values of a place count for nothing until the pass at this place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import numpy as np

from pronk.engine.batch import Batch
from pronk.torch_engine.kv import TorchKV
from pronk.torch_engine.predictions import Likeliest

# One begun in vain costs a pass, and one that is asked for saves a tenth of one.
PATIENCE = 4  # passes in a row that continued the last, before one is begun unasked

F = TypeVar("F")  # what a pass finds


class _Last(NamedTuple):
    batch: Batch
    kv: ReferenceType[TorchKV]  # whose memory is to be let go when its owner lets go of it
    likeliest: Likeliest


class Ahead(Generic[F]):
    """Of the passes of one model, as they are asked for one after the other."""

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._begun: tuple[Batch, F] | None = None  # whose tokens are the likeliest of the last
        self._followed = 0  # passes in a row that continued the one before

    def take(self, batch: Batch, kv: TorchKV) -> F | None:
        """What the pass that is asked for found, if it is the one that was begun."""
        begun, follows = self._begun, self._continues(batch, kv)
        self._followed = self._followed + 1 if follows else 0
        self._last = self._begun = None
        return begun[1] if begun and follows and _same_places(batch, begun[0]) else None

    def following(self, batch: Batch, kv: TorchKV, likeliest: Likeliest) -> Batch | None:
        """The pass that may be begun after this one: its tokens are missing. None where none is likely, or where a text
        goes on in a block that it does not have yet."""
        self._last = _Last(batch, ref(kv), likeliest)
        if self._followed < PATIENCE:
            return None
        positions = batch.positions + 1
        if (positions // kv.block_size >= np.diff(batch.block_offsets)).any():
            return None
        return replace(batch, positions=positions, furthest=batch.furthest + 1)

    def begun(self, batch: Batch, found: F) -> None:
        """Behind the pass that `following` was last told of."""
        self._begun = batch, found

    def forget(self) -> None:
        self._last = self._begun = None
        self._followed = 0

    def _continues(self, batch: Batch, kv: TorchKV) -> bool:
        """Whether these are the texts of the last pass, each with its likeliest token; without waiting for these, for
        who has not read them does not go on by them."""
        last = self._last
        likeliest = last and last.likeliest.known
        return (
            last is not None
            and likeliest is not None
            and last.kv() is kv
            and len(batch.token_ids) == len(last.batch.token_ids) == len(batch.offsets) - 1
            and len(batch.logits_rows) == len(batch.token_ids)
            and np.array_equal(batch.positions, last.batch.positions + 1)
            and batch.token_ids.tolist() == [token for token, _ in likeliest]
        )


def _same_places(a: Batch, b: Batch) -> bool:
    return np.array_equal(a.block_offsets, b.block_offsets) and np.array_equal(a.blocks, b.blocks)
