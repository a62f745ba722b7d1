"""Windows of a text: what a model reads in one go, which of its predictions count, and a Reader that holds few at once.

A prediction is worth as much as the text before it, so measures of quality read a text in windows and count only those
predictions that had enough to go by. Two protocols are in use, and their figures differ:

- llama.cpp's: windows of `ctx` tokens side by side; what is left at the end is dropped; the first token of each gives
  way to the token that texts begin with, where the tokenizer puts one; the second half counts, which is tokens
  ctx/2 + 1 to ctx - 1 of each window, or 255 of 512.
- Hugging Face's strided one: windows of `ctx` tokens, each `stride` further on, and in each those tokens count that no
  window before it reached: all of the text but its first token (with stride = ctx, the first of each window). Nothing
  is replaced.

A window is read in pieces, and nothing depends on them, unless the tokens of a pass share a scale (absmax, zeropoint):
then each window is one pass, so that a figure is of the window and not of its pieces.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.engine.backend import Backend
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.engine.sampling import NotNumbers
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.watched import Told

Logits = NDArray[np.float32]  # [rows, V]

LOGITS_BYTES = 16 << 20  # at most, in the pieces that a Reader gives: 85 rows of a vocabulary of 49,152
_SHORTEST = 4  # tokens: the second half of three is a single prediction out of almost nothing


@dataclass(frozen=True)
class Window:
    """What is read, and what counts of it: row `first + n` of the logits predicts `targets[n]`."""

    ids: Sequence[int]  # the last target is not read: nothing is predicted from it
    first: int
    targets: Sequence[int]
    begin: int = field(default=0, compare=False)  # where in the text


def evaluation_text() -> str:
    """The text that comes with pronk, written for this: a dozen kinds of prose, and some code."""
    return gzip.decompress(files("pronk.measure").joinpath("evaluation.txt.gz").read_bytes()).decode()


def windows(
    ids: Sequence[int], ctx: int, stride: int | None = None, count: int | None = None, *, bos: int | None = None
) -> list[Window]:
    """Those of a text: llama.cpp's, or with `stride` Hugging Face's. `count`: that many, spread evenly over the text.

    `bos`: the token that replaces the first of each of llama.cpp's windows (see `begins_with`). Raises BadRequest where
    the text is shorter than one window.
    """
    for name, value, least in (("ctx", ctx, _SHORTEST), ("stride", stride, 1), ("count", count, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise BadRequest(f"{name} must be a whole number from {least} on, not {value!r}")
    if stride is not None and stride > ctx:
        raise BadRequest(f"stride={stride} would skip tokens between windows of {ctx}; take one of at most {ctx}")
    if len(ids) < ctx:
        raise BadRequest(
            f"the text has {len(ids)} tokens, and a window takes {ctx}; give a longer text, or smaller windows (--ctx)"
        )
    if stride is None:
        begins: Sequence[int] = range(0, len(ids) - ctx + 1, ctx)
        starts = _spread(begins, count)
        return [replace(_half(ids[at : at + ctx], bos), begin=at) for at in starts]
    # The last window is the first that reaches the text's end, unless all it has is a token that nothing stands before.
    begins = range(0, min(len(ids) - ctx + stride, len(ids) - 1), stride)
    return [_newest(ids, at, ctx, stride) for at in _spread(begins, count)]


def begins_with(llm: LLM) -> int | None:
    """The token that the model's tokenizer puts before every text; None where it puts none."""
    return llm.tokenizer.bos_id if llm.has_tokenizer and llm.tokenizer.add_bos else None


def check_context(backend: Backend, longest: int) -> None:
    """Raises BadRequest where windows of which `longest` tokens are read do not fit."""
    if longest > backend.ctx_size:
        raise BadRequest(
            f"ctx is too long: {longest} tokens of each window are read, and the context has {backend.ctx_size}"
        )


def check_numbers(logits: Logits) -> None:
    """Raises PronkError where one is none."""
    if not np.isfinite(logits).all():
        raise NotNumbers


def watched(texts: Sequence[Window], progress: Progress | None) -> Iterator[Window]:
    """The windows one by one, telling how many of their tokens have been read."""
    told = Told(progress, "reading", sum(len(window.ids) for window in texts))
    told(0)
    for window in texts:
        yield window
        told(len(window.ids))


def _spread(begins: Sequence[int], count: int | None) -> list[int]:
    """`count` of them, as far apart as they can be; all of them where there are no more."""
    most = len(begins)
    wanted = most if count is None else min(count, most)
    return [begins[number * most // wanted] for number in range(wanted)]


def _half(ids: Sequence[int], bos: int | None) -> Window:
    read = list(ids[:-1])
    if bos is not None:
        read[0] = bos
    first = len(ids) // 2
    return Window(read, first, list(ids[first + 1 :]))


def _newest(ids: Sequence[int], at: int, ctx: int, stride: int) -> Window:
    end = min(at + ctx, len(ids))
    reached = at - stride + ctx if at else 0  # by the windows before
    new = end - max(reached, at + 1)
    read = list(ids[at : end - 1])
    return Window(read, len(read) - new, list(ids[end - new : end]), at)


class Side(Protocol):
    """What gives predictions, window by window: a model's Reader, or a Recording of one."""

    shares_scales: bool

    def read(self, window: Window) -> Iterator[tuple[Logits, Sequence[int]]]:
        """The logits of the rows that count and the tokens that follow them, in `pieces`."""


def pieces(window: Window, vocab_size: int) -> list[tuple[int, int]]:
    """The rows that count, from and to, of at most LOGITS_BYTES together: the same ones for all with one vocabulary."""
    rows = min(PASS_TOKENS, max(1, LOGITS_BYTES // (4 * vocab_size)))
    return [(at, min(at + rows, len(window.ids))) for at in range(window.first, len(window.ids), rows)]


class Reader:
    """A model that reads windows, one after another, through one KV cache."""

    def __init__(self, backend: Backend, longest: int) -> None:
        """`longest`: tokens of the longest window."""
        check_context(backend, longest)
        self._backend, self.shares_scales = backend, backend.shares_scales
        self._kv = backend.new_kv(-(-longest // BLOCK_SIZE), BLOCK_SIZE)

    @classmethod
    def of(cls, llm: LLM, texts: Sequence[Window]) -> Reader:
        return cls(llm.backend, max(len(window.ids) for window in texts))

    def read(self, window: Window) -> Iterator[tuple[Logits, Sequence[int]]]:
        """See Side. Raises PronkError where a logit is no number."""
        for at in range(0, 0 if self.shares_scales else window.first, PASS_TOKENS):
            self._forward(window, at, min(at + PASS_TOKENS, window.first), wanted=False)
        for at, end in pieces(window, self._backend.config.vocab_size):
            logits = self._forward(window, at, end, wanted=True)
            check_numbers(logits)
            yield logits, window.targets[at - window.first : end - window.first]

    def _forward(self, window: Window, at: int, end: int, *, wanted: bool) -> Logits:
        """Of rows `at` to `end`; where tokens share scales, of a pass over the whole window, made anew for each."""
        begin, reach = (0, len(window.ids)) if self.shares_scales else (at, end)
        run = Run(window.ids[begin:reach], begin, range(-(-reach // BLOCK_SIZE)), "all" if wanted else "none")
        batch = Batch.of([run])
        batch = replace(batch, logits_rows=batch.logits_rows[at - begin : end - begin])
        return self._backend.forward(batch, self._kv)
