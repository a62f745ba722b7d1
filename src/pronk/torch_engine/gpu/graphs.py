"""Graphs: passes whose sizes come again, captured once for each and then replayed by one launch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from pronk.engine.batch import Batch
from pronk.torch_engine.gpu.ahead import Ahead
from pronk.torch_engine.gpu.likeliest import likeliest
from pronk.torch_engine.gpu.paged import Int32, PagedBatch, Room, Tiling, fill, lay_out
from pronk.torch_engine.gpu.step import Step
from pronk.torch_engine.kv import TorchKV
from pronk.torch_engine.model import Llama
from pronk.torch_engine.predictions import Likeliest

MOST = 256  # texts of a pass that is captured, each with one token
LONGEST = 2048  # tokens of a text alone, whose pass is: with more, kernels run for longer than the host starts them
_KEPT, _PROMPTS = 32, 8  # graphs of a cache, with their logits: of tokens of several texts, and of texts alone
_BLOCK = 64  # tokens, of a cache of one pass
_ANGLES = 8192  # positions that have theirs from the first pass on: where they lie is written into graphs


class Found(NamedTuple):
    logits: Tensor  # [R, V]
    likeliest: Likeliest


class _Size(NamedTuple):
    """Of a pass that is captured."""

    room: Room
    tiling: Tiling


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    host: Tensor  # pinned, of which `buffer` is a copy
    to: dict[str, Int32]  # its parts
    buffer: Tensor  # all that the graph reads of a batch
    tokens: Tensor  # the part of it with the tokens
    logits: Tensor  # of all rows
    likeliest: Tensor  # of them, [2, R]


@dataclass
class _Kept:
    """Of one cache, while it lies where it lies: what a graph reads is written into it."""

    addresses: tuple[int, ...]
    decoding: OrderedDict[tuple[object, ...], _Captured] = field(default_factory=OrderedDict)  # the newest last
    prompts: OrderedDict[tuple[object, ...], _Captured] = field(default_factory=OrderedDict)
    seen: OrderedDict[_Size, None] = field(default_factory=OrderedDict)  # sizes of prompts


class Graphs:
    """Of one Step and module, over any caches. What is given out is nobody else's."""

    def __init__(self, step: Step, model: Llama) -> None:
        self.step, self._model = step, model
        config = model.config
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._kept: WeakKeyDictionary[TorchKV, _Kept] = WeakKeyDictionary()
        self._pool: object = None
        self._lock = threading.Lock()
        self._copied = torch.cuda.Event()
        self._ahead: Ahead[Found] = Ahead()
        # The last that was replayed: only its likeliest tokens are those of the last pass.
        self._latest: ReferenceType[_Captured] | None = None

    def forget(self) -> None:
        """To be called where something else computes with a cache: what was begun ahead may not count any more."""
        with self._lock:
            self._ahead.forget()

    def __call__(self, batch: Batch, kv: TorchKV | None) -> Found:
        """`kv` None: of whole texts, whose keys and values a layer forgets when it is done."""
        if kv is None:
            batch, kv = forgetful(batch, self._model)
        with torch.cuda.device(kv.device), self._lock:  # kernels and streams are those of the current one
            found = self._ahead.take(batch, kv)
            if (size := self._size(batch, kv)) is None:
                invariant = self.step.invariant
                there = PagedBatch.of(batch, kv.block_size, self._group, kv.device, invariant=invariant)
                logits, most = self._computed(there, kv)
                return Found(logits, Likeliest(most))
            captured = self._graph(batch, kv, size)
            if found is None or self._latest is None or self._latest() is not captured:
                self._give(captured, batch, kv)
                found = self._replayed(captured, batch)
            following = self._ahead.following(batch, kv, found.likeliest)
            if following and size.room.tokens == size.room.runs and self._size(following, kv) == size:
                with suppress(torch.OutOfMemoryError):  # what was asked for is found
                    self._begin(captured, following, kv)
            return found

    def _begin(self, captured: _Captured, batch: Batch, kv: TorchKV) -> None:
        """A pass behind the last, with its likeliest tokens."""
        texts, tokens = len(batch.token_ids), captured.likeliest[0]
        self._give(captured, batch, kv)
        captured.tokens[:texts].copy_(tokens[:texts])
        if texts < len(tokens):  # copies of the last text, as `fill` has it
            captured.tokens[texts:].copy_(tokens[texts - 1].expand(len(tokens) - texts))
        self._ahead.begun(batch, self._replayed(captured, batch))

    def _size(self, batch: Batch, kv: TorchKV) -> _Size | None:
        """None: of one that is not captured."""
        tokens, texts, rows = len(batch.token_ids), len(batch.offsets) - 1, len(batch.logits_rows)
        decodes = tokens == texts
        if kv.forgets:
            return None
        tiling = Tiling.of(decodes, self._group, batch.furthest, invariant=self.step.invariant)
        blocks = -(-tiling.reach // kv.block_size)
        if decodes and rows == texts <= MOST:
            many = _bucket(texts)
            return _Size(Room(many, many, many, blocks, many), tiling)
        if not decodes and texts == 1 and rows <= 1 and tokens <= LONGEST:
            size = _Size(Room(tokens, rows, 1, blocks, -(-tokens // tiling.queries)), tiling)
            return size if self._came_before(size, kv) else None
        return None

    def _came_before(self, size: _Size, kv: TorchKV) -> bool:
        seen = self._of(kv).seen
        known = size in seen
        seen[size] = None
        seen.move_to_end(size)
        if len(seen) > _PROMPTS:
            seen.popitem(last=False)
        return known

    def _of(self, kv: TorchKV) -> _Kept:
        """A cache that has grown lies elsewhere, and its graphs are of no use."""
        found = self._kept.get(kv)
        if found is None or found.addresses != kv.addresses:
            found = self._kept[kv] = _Kept(kv.addresses)
        return found

    def _graph(self, batch: Batch, kv: TorchKV, size: _Size) -> _Captured:
        angles = max(size.tiling.reach, min(_ANGLES, self._model.config.max_position_embeddings))
        rope = self._model.model.rope.reaching(angles - 1, kv.device)
        key = *size, rope.shape[1], rope.data_ptr(), kv.block_size
        kept = self._of(kv)
        decodes = size.room.tokens == size.room.runs
        graphs, most = (kept.decoding, _KEPT) if decodes else (kept.prompts, _PROMPTS)
        found = graphs.pop(key, None) or self._capture(batch, kv, size)
        graphs[key] = found
        if len(graphs) > most:
            graphs.popitem(last=False)
        return found

    def _give(self, captured: _Captured, batch: Batch, kv: TorchKV) -> None:
        self._copied.synchronize()  # until what was copied last is there
        fill(captured.to, batch, kv.block_size)
        captured.buffer.copy_(captured.host, non_blocking=True)
        self._copied.record()

    def _replayed(self, captured: _Captured, batch: Batch) -> Found:
        rows = len(batch.logits_rows)
        captured.graph.replay()
        self._latest = ref(captured)
        return Found(captured.logits[:rows].clone(), Likeliest(captured.likeliest, rows))

    def _computed(self, batch: PagedBatch, kv: TorchKV) -> tuple[Tensor, Tensor]:
        logits = self.step(self._model, batch, kv)
        return logits, likeliest(logits)

    def _capture(self, batch: Batch, kv: TorchKV, size: _Size) -> _Captured:
        """Computed once before: what is compiled or set up at its first use cannot be while it is captured."""
        room = size.room
        host = torch.zeros(room.size, dtype=torch.int32).pin_memory()
        buffer = torch.empty(room.size, dtype=torch.int32, device=kv.device)
        to, there = room.within(host.numpy()), room.within(buffer)
        lay_out(to, np.full(room.runs, room.tokens // room.runs), size.tiling)
        to["logits_rows"][:] = np.arange(room.rows)
        fill(to, batch, kv.block_size)
        buffer.copy_(host)
        paged = PagedBatch(**there, block_size=kv.block_size, furthest=size.tiling.reach - 1, tiling=size.tiling)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._computed(paged, kv)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
            logits, most = self._computed(paged, kv)
        return _Captured(graph, host, to, buffer, there["token_ids"], logits, most)


def forgetful(batch: Batch, model: Llama) -> tuple[Batch, TorchKV]:
    """A cache that holds the batch's keys and values, of one layer at a time. Raises ValueError for a run that does not
    begin at position 0."""
    starts = batch.positions[batch.offsets[:-1]]
    if starts.any():
        run = int(starts.nonzero()[0][0])
        raise ValueError(f"run {run} starts at position {starts[run]}, but there is no cache to hold those before")
    ends = np.cumsum(-(-batch.lengths // _BLOCK), dtype=np.int32)
    weight = model.model.embed_tokens.weight
    kv = TorchKV(model.config, int(ends[-1]), _BLOCK, weight.dtype, weight.device, forgets=True)
    blocks, offsets = np.arange(ends[-1], dtype=np.int32), np.concatenate((np.zeros(1, np.int32), ends))
    return replace(batch, blocks=blocks, block_offsets=offsets), kv


def _bucket(texts: int) -> int:
    """What so many are filled up to."""
    return 1 << (texts - 1).bit_length() if texts <= 8 else -(-texts // 8) * 8
