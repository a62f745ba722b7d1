"""Adapters: LoRA adapters that are kept beside a Llama module's weights, as hooks of its Linears."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pronk.checkpoint.adapter import Adapter
from pronk.engine.batch import Batch
from pronk.errors import BadRequest
from pronk.torch_engine.model import Llama

Span = tuple[int, int, int]  # rows [begin, end) of a pass, and the number of their adapter
Factors = tuple[Tensor, Tensor]  # A [rank, K] and scale B [N, rank], in the type that the model computes in


class Adapters:
    """Of one module. `model` must not be trained: an adapter's numbers take no gradients."""

    def __init__(self, model: Llama, dtype: torch.dtype) -> None:
        self._model, self._dtype, self._numbers = model, dtype, itertools.count(1)
        self._factors: dict[str, dict[int, Factors]] = {}  # by module, by number
        self._numbered: set[int] = set()
        self._pass = threading.local()

    @property
    def numbers(self) -> Collection[int]:
        return self._numbered

    @property
    def nbytes(self) -> int:
        pairs = (pair for of in self._factors.values() for pair in of.values())
        return sum(t.numel() * t.element_size() for pair in pairs for t in pair)

    def attach(self, adapter: Adapter) -> int:
        """Raises BadRequest for products beside what is of no layer."""
        for name in adapter.products:
            if not name.startswith("model.layers."):
                raise BadRequest(f"{adapter.path}: adapts {name}, beside which nothing is kept; merge the adapter")
        number, device = next(self._numbers), self._model.model.embed_tokens.weight.device
        for name, product in adapter.products.items():
            if name not in self._factors:
                self._factors[name] = {}
                self._model.get_submodule(name).register_forward_hook(self._hook(self._factors[name]))
            a, b = torch.tensor(product.a), torch.tensor(product.b) * product.scale  # copies: what is read may be a map
            self._factors[name][number] = a.to(device, self._dtype), b.to(device, self._dtype)
        self._numbered.add(number)
        return number

    def detach(self, number: int) -> None:
        self._numbered.discard(number)
        for factors in self._factors.values():
            factors.pop(number, None)

    @contextmanager
    def beside(self, batch: Batch, usual: int) -> Iterator[None]:
        """While it holds, this thread's pass over `batch` has the adapters of its runs."""
        numbers = batch.adapters_of_runs(usual)
        if numbers is None:
            yield
            return
        offsets, rows = batch.offsets.tolist(), batch.logits_rows
        ends = [0, *rows.searchsorted(batch.offsets[1:]).tolist()]
        self._pass.spans = {  # by how many rows a product has: all, or in the last layer those that anyone reads
            len(rows): list(zip(ends[:-1], ends[1:], numbers, strict=True)),
            offsets[-1]: list(zip(offsets[:-1], offsets[1:], numbers, strict=True)),
        }
        try:
            yield
        finally:
            self._pass.spans = None

    def _hook(self, factors: dict[int, Factors]) -> Any:
        def add(_: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
            spans: dict[int, list[Span]] | None = getattr(self._pass, "spans", None)
            if not spans:
                return out
            (x,) = given
            for begin, end, number in spans[len(x)]:
                if begin < end and (pair := factors.get(number)):
                    a, b = pair
                    out[begin:end] += nn.functional.linear(nn.functional.linear(x[begin:end].to(a.dtype), a), b)
            return out

        return add
