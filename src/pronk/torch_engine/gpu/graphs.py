"""Graphs: passes in which each text gets one token, captured once for every size, then replayed by one launch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pronk.engine.batch import Batch
from pronk.torch_engine.gpu.likeliest import likeliest
from pronk.torch_engine.gpu.paged import Int32, PagedBatch, Room, Tiling, fill
from pronk.torch_engine.gpu.step import Step
from pronk.torch_engine.kv import TorchKV
from pronk.torch_engine.model import Llama

MOST = 256  # texts of a pass that is captured
_KEPT = 32  # graphs, with their logits
_BLOCK = 64  # tokens, of a cache of one pass
_ANGLES = 8192  # positions that have theirs from the first pass on: where they lie is written into graphs


class Found(NamedTuple):
    logits: Tensor  # [R, V]
    likeliest: Tensor  # of them, [2, R]: see predictions.likeliest


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    host: Tensor  # pinned, of which `there` is a copy
    to: dict[str, Int32]  # its parts
    there: Tensor  # all that the graph reads of a batch
    found: Found  # of all texts


class Graphs:
    """Of one Step and module, over any caches. What is given out is nobody else's."""

    def __init__(self, step: Step, model: Llama) -> None:
        self.step, self._model = step, model
        config = model.config
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._captured: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        self._pool: object = None
        self._lock = threading.Lock()
        self._copied = torch.cuda.Event()

    def __call__(self, batch: Batch, kv: TorchKV | None) -> Found:
        """`kv` None: of whole texts, whose keys and values a layer forgets when it is done."""
        invariant = self.step.invariant
        if kv is None:
            batch, kv = forgetful(batch, self._model)
        with torch.cuda.device(kv.device):  # kernels and streams are those of the current one
            return self._found(batch, kv, invariant)

    def _found(self, batch: Batch, kv: TorchKV, invariant: bool) -> Found:
        texts = len(batch.offsets) - 1
        if kv.forgets or not len(batch.token_ids) == texts == len(batch.logits_rows) or texts > MOST:
            there = PagedBatch.of(batch, kv.block_size, self._group, kv.device, invariant=invariant)
            return self._computed(there, kv)
        tiling, size = Tiling.of(True, self._group, batch.furthest, invariant=invariant), _bucket(texts)
        reach = tiling.chunk * tiling.splits
        angles = max(reach, min(_ANGLES, self._model.config.max_position_embeddings))
        rope = self._model.model.rope.reaching(angles - 1, kv.device)
        # What a graph reads lies where it lay when it was captured: a cache that has grown is another one.
        key = size, reach, rope.shape[1], rope.data_ptr(), kv.block_size, *kv.addresses
        with self._lock:
            known = self._captured.pop(key, None)
            self._copied.synchronize()  # until what was copied last is there
            found = known or self._capture(batch, kv, size, tiling)
            self._captured[key] = found  # the newest
            if len(self._captured) > _KEPT:
                self._captured.popitem(last=False)
            fill(found.to, batch, kv.block_size)
            found.there.copy_(found.host, non_blocking=True)
            self._copied.record()
            found.graph.replay()
            return Found(found.found.logits[:texts].clone(), found.found.likeliest[:, :texts].clone())

    def _computed(self, batch: PagedBatch, kv: TorchKV) -> Found:
        logits = self.step(self._model, batch, kv)
        return Found(logits, likeliest(logits))

    def _capture(self, batch: Batch, kv: TorchKV, size: int, tiling: Tiling) -> _Captured:
        """Computed once before: what is compiled or set up at its first use cannot be while it is captured."""
        reach = tiling.chunk * tiling.splits
        room = Room(size, size, size, -(-reach // kv.block_size), size)
        host = torch.zeros(room.size, dtype=torch.int32).pin_memory()
        there = torch.empty(room.size, dtype=torch.int32, device=kv.device)
        paged = PagedBatch.decoding(there, host, room, kv.block_size, tiling, reach - 1)
        to = room.within(host.numpy())
        fill(to, batch, kv.block_size)
        there.copy_(host)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._computed(paged, kv)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
            found = self._computed(paged, kv)
        return _Captured(graph, host, to, there, found)


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
