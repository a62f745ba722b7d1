"""Rope: the tables of rotary position embedding that the native model reads."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

from pronk.config import ModelConfig
from pronk.config.rope import cos_sin, inverse_frequencies

if TYPE_CHECKING:
    from pronk import _native


class Rope:
    """cos and sin of every position's angles, tabulated as far as positions have reached."""

    def __init__(self, model: _native.Model, config: ModelConfig, ctx_size: int) -> None:
        self._model, self._inv_freq, self._reached = model, inverse_frequencies(config, ctx_size), 0
        # Calls from several threads must not replace a table by a shorter one, nor may that of a signal handler, which
        # must not wait for the call that it interrupts.
        self._lock = RLock()

    def reach(self, position: int) -> None:
        if position < self._reached:
            return
        with self._lock:
            if position >= self._reached:
                reached = max(256, 2 * self._reached, position + 1)
                tables = cos_sin(self._inv_freq, 0, reached)
                if reached > self._reached:
                    self._model.set_rope(*tables)
                    self._reached = reached
