"""Adapters: LoRA adapters that are kept beside the native model's packed weights (src/native/adapter.h)."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pronk.cpu_engine import weights
from pronk.engine.batch import Batch
from pronk.errors import BadRequest, NotEnoughMemory, PronkError

if TYPE_CHECKING:
    from pronk import _native
    from pronk.checkpoint.adapter import Adapter


class Adapters:
    def __init__(self, model: _native.Model) -> None:
        self._model, self._numbers = model, itertools.count(1)
        self._places: dict[int, int] = {0: -1}  # in the model, where they are used again, by number
        self._bytes: dict[int, int] = {}

    @property
    def numbers(self) -> Collection[int]:
        return self._bytes.keys()

    @property
    def nbytes(self) -> int:
        return sum(self._bytes.values())

    def attach(self, adapter: Adapter) -> int:
        """Raises BadRequest for products beside what is of no layer, and NotEnoughMemory."""
        modules = []
        for name, product in adapter.products.items():
            role, layer, _ = weights.place(f"{name}.weight")
            if layer < 0:
                raise BadRequest(f"{adapter.path}: adapts {name}, beside which nothing is kept; merge the adapter")
            modules.append((role, layer, product.a, np.ascontiguousarray(product.b), product.scale))
        try:
            place, nbytes = self._model.attach(modules)
        except MemoryError:
            raise NotEnoughMemory(f"{adapter.path}: memory ran out", "detach another adapter first") from None
        except ValueError as error:
            raise BadRequest(f"{adapter.path}: {error}; merge it with --merge-adapter") from None
        except RuntimeError as error:  # called where waiting for the pass under way would never end
            raise PronkError(f"{error}") from None
        number = next(self._numbers)
        self._places[number], self._bytes[number] = place, nbytes
        return number

    def detach(self, number: int) -> None:
        try:
            self._model.detach(self._places[number])
        except RuntimeError as error:  # as above
            raise PronkError(f"{error}") from None
        del self._places[number], self._bytes[number]

    def of(self, batch: Batch, usual: int) -> NDArray[np.int32] | None:
        """Where the adapter of each run is, [N]; None where none has any."""
        if (numbers := batch.adapters_of_runs(usual)) is None:
            return None
        return np.array([self._places[number] for number in numbers], np.int32)
