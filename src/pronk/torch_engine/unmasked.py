"""Unmasked: a TorchBackend on which every token looks at all of its text: to see what a mask is for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pronk.engine.backend import Backend, KVStorage
from pronk.engine.batch import Batch
from pronk.errors import BadRequest
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.batch import Rows, TorchBatch


class AllSeen(Rows):
    @property
    def mask(self) -> Tensor:
        size = self.end - self.begin
        return torch.ones(size, size, dtype=torch.bool)


class Unmasked(TorchBackend):
    """Without a cache, and by the attention that is written out: the fused one makes its mask itself."""

    def __init__(self, backend: Backend) -> None:
        if not isinstance(backend, TorchBackend) or backend.model.model.layers[0].self_attn.mode != "math":
            raise BadRequest("attention without its mask takes the torch engine, loaded with attn='math'")
        super().__init__(backend.model, backend.ctx_size)

    def _logits(self, batch: Batch, kv: KVStorage | None) -> Tensor:
        assert kv is None
        masked = TorchBatch.of(batch, torch.device(self.device), None)
        runs = tuple(AllSeen(run.begin, run.end, 0, None) for run in masked.runs)
        logits: Tensor = self.model(replace(masked, runs=runs))
        return logits
