"""Recording: what a reference predicts where windows of a text count, kept for many models that are held against it.

It is kept in memory for mixed precision and sweeps, which hold dozens of models against one, or in a file, for other
processes; the reference itself is let go before there is another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.divergence import apart, check_vocabularies, nudged
from pronk.measure.windows import Logits, Reader, Side, Window, begins_with, pieces, watched, windows

KEPT = 1 << 29  # bytes of logits in memory, at most
_DIGEST = 32
END = _DIGEST + 1  # bytes behind the logits of a recording in a file


class Recording:
    """Read like a Reader, again and again. `logits` [rows, V]: of what counts in `texts`, in memory or in a file."""

    def __init__(self, texts: Sequence[Window], logits: Logits, shares_scales: bool) -> None:
        self.shares_scales = shares_scales
        ends = [*accumulate(len(window.targets) for window in texts)]
        self._kept = {
            window.begin: (window.ids, logits[end - len(window.targets) : end])
            for window, end in zip(texts, ends, strict=True)
        }

    def read(self, window: Window) -> Iterator[tuple[Logits, Sequence[int]]]:
        ids, logits = self._kept[window.begin]
        if ids != window.ids:
            raise ValueError("this window differs from the one that was recorded")
        for begin, end in pieces(window, logits.shape[1]):
            rows = slice(begin - window.first, end - window.first)
            yield logits[rows], window.targets[rows]


class Yardstick:
    """Divergence from `reference` on a text, in windows of `ctx` tokens (`count`: of that many). Where its logits are
    too many for memory the reference stays, and computes them each time.
    """

    def __init__(
        self,
        reference: LLM,
        ids: Sequence[int],
        ctx: int,
        count: int | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """`progress`: of reading the text, which may be done here or, with each model, later."""
        self._name, self._vocab_size, self._ctx = reference.name, reference.config.vocab_size, ctx
        self._texts = windows(ids, ctx, count=count, bos=begins_with(reference))
        reader = Reader.of(reference, self._texts)
        self._reference: Side = reader
        rows = sum(len(window.targets) for window in self._texts)
        if 4 * rows * self._vocab_size <= KEPT:
            logits, at = np.empty((rows, self._vocab_size), np.float32), 0
            for some in _read(reader, self._texts, progress):
                logits[at : (at := at + len(some))] = some
            self._reference = Recording(self._texts, logits, reader.shares_scales)

    def divergence(self, llm: LLM, progress: Progress | None = None) -> dict[str, Any]:
        """See pronk.measure.divergence."""
        check_vocabularies(self._name, self._vocab_size, llm)
        return apart(self._reference, Reader.of(llm, self._texts), self._texts, self._ctx, progress)

    def noise_floor(self, reference: LLM, progress: Progress | None = None) -> dict[str, Any]:
        """Of the reference, which is asked once more: see pronk.measure.divergence."""
        return apart(self._reference, nudged(reference, self._texts), self._texts, self._ctx, progress)


def record(
    llm: LLM, path: Path, ids: Sequence[int], *, ctx: int, count: int, progress: Progress | None = None
) -> dict[str, Any]:
    """What `llm` predicts where windows of a text count, kept in `path` for `divergence_from`; and behind it of which
    windows, and whether tokens share scales."""
    texts = windows(ids, ctx, count=count, bos=begins_with(llm))
    reader = Reader.of(llm, texts)
    with path.open("wb") as file:
        for logits in _read(reader, texts, progress):
            logits.tofile(file)
        file.write(_digest(texts) + bytes([reader.shares_scales]))
    return {"bytes": path.stat().st_size}


def divergence_from(
    llm: LLM, path: Path, ids: Sequence[int], *, ctx: int, count: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Of `llm` from a model that was recorded on the same windows: see pronk.measure.divergence. Raises BadRequest
    where the recording is of others, or not all of it is there."""
    texts, vocab_size = windows(ids, ctx, count=count, bos=begins_with(llm)), llm.config.vocab_size
    rows = sum(len(window.targets) for window in texts)
    with path.open("rb") as file:
        file.seek(4 * rows * vocab_size)
        digest, shares_scales = file.read(_DIGEST), file.read()
    if digest != _digest(texts) or len(shares_scales) != 1:
        raise BadRequest(f"{path} holds no logits of these {rows} predictions")
    recording = Recording(texts, np.memmap(path, np.float32, "r", shape=(rows, vocab_size)), bool(shares_scales[0]))
    return apart(recording, Reader.of(llm, texts), texts, ctx, progress)


def _read(reader: Reader, texts: Sequence[Window], progress: Progress | None) -> Iterator[Logits]:
    for window in watched(texts, progress):
        for logits, _ in reader.read(window):
            yield logits


def _digest(texts: Sequence[Window]) -> bytes:
    return sha256(repr([(list(window.ids), window.first) for window in texts]).encode()).digest()
