"""Replay: the logits that a backend gave once, given again; Yardstick: a reference that many models are held against.

Mixed precision and sweeps measure dozens of models against one. Its logits are computed once, before there is another
model in memory, and kept, which for few windows is less than the model itself; that is let go. Of many windows they are
computed each time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronk.engine.batch import Batch
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.divergence import divergence
from pronk.measure.windows import Reader, Window, begins_with, watched, windows

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress
    from pronk.engine.backend import Backend, KVStorage


KEPT = 1 << 29  # bytes of logits, at most


class Yardstick:
    """Divergence from `reference` on a text, in windows of `ctx` tokens (`count`: of that many)."""

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
        self._ids, self._ctx, self._count = ids, ctx, count
        texts = windows(ids, ctx, count=count, bos=begins_with(reference))
        rows = sum(len(window.targets) for window in texts)
        self._replay = Replay(reference.backend) if 4 * rows * reference.config.vocab_size <= KEPT else None
        if self._replay:
            _read(self._replay, texts, progress)
            self._replay.rewind()
        tokenizer = reference.tokenizer if reference.has_tokenizer else None
        backend = self._replay or reference.backend
        self._reference = LLM(reference.name, reference.checkpoint, tokenizer, backend, prefix_cache=0)

    def divergence(self, llm: LLM, progress: Progress | None = None) -> dict[str, Any]:
        """See pronk.measure.divergence."""
        found = divergence(self._reference, llm, self._ids, ctx=self._ctx, count=self._count, progress=progress)
        if self._replay:
            self._replay.rewind()
        return found


class Replay:
    """A Backend that computes each pass of a round once, and then answers the same round again and again.

    With `path` the logits are kept in that file, as they come, and what was asked for in one beside it: `reopened`
    answers from these two, in another process and without the model.
    """

    def __init__(self, backend: Backend, path: Path | None = None) -> None:
        self._is_like(backend)
        self._backend: Backend | None = backend
        self._file = path.open("wb") if path else None
        self._path, self._next = path, 0
        self._passes: list[tuple[dict[str, Any], NDArray[np.float32]]] = []

    @classmethod
    def reopened(cls, path: Path, like: Backend) -> Replay:
        """`like`: a backend of the same model, in whatever type. Raises BadRequest where the files do not belong."""
        replay = cls.__new__(cls)
        replay._is_like(like)
        asked = json.loads(_index(path).read_text(encoding="utf-8"))
        passes, rows = asked["passes"], sum(len(one["logits_rows"]) for one in asked["passes"])
        replay.exact, replay.shares_scales = asked["exact"], asked["shares_scales"]
        size = (rows, like.config.vocab_size)
        if path.stat().st_size != 4 * rows * like.config.vocab_size:
            raise BadRequest(f"{path} holds no logits of {rows} predictions")
        logits = np.memmap(path, np.float32, "r", shape=size)
        ends = np.cumsum([len(one["logits_rows"]) for one in passes]).tolist()
        replay._backend, replay._file, replay._path, replay._next = None, None, path, 0
        replay._passes = [(one, logits[at:end]) for one, at, end in zip(passes, [0, *ends], ends, strict=False)]
        return replay

    def _is_like(self, backend: Backend) -> None:
        self.config, self.ctx_size = backend.config, backend.ctx_size
        self.device, self.dtype, self.nbytes = backend.device, backend.dtype, backend.nbytes
        self.engine, self.exact, self.shares_scales = backend.engine, backend.exact, backend.shares_scales

    def new_kv(self, num_blocks: int, block_size: int) -> KVStorage:
        return self._backend.new_kv(num_blocks, block_size) if self._backend else _Nothing(num_blocks, block_size)

    def perturbed(self) -> Backend:
        raise NotImplementedError("a recording has no noise of its own")

    def rewind(self) -> None:
        """A round is over."""
        if self._file and self._path:
            self._file.close()
            self._file = None
            passes = [asked for asked, _ in self._passes]
            about = {"exact": self.exact, "shares_scales": self.shares_scales, "passes": passes}
            _index(self._path).write_text(json.dumps(about), encoding="utf-8")
        self._backend, self._next = None, 0

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        asked = {name: getattr(batch, name).tolist() for name in ("token_ids", "positions", "logits_rows")}
        if self._backend:
            made = self._backend.forward(batch, kv)
            if self._file:
                made.tofile(self._file)
            self._passes.append((asked, made[:0] if self._file else made))
            return made
        then, logits = self._passes[self._next]
        if asked != then:
            raise ValueError("this round differs from the one that was recorded")
        self._next += 1
        return logits


def record(llm: LLM, path: Path, ids: Sequence[int], *, ctx: int, count: int, progress: Progress | None = None) -> None:
    """What `llm` predicts where windows of a text count, kept in `path` for `divergence_from`."""
    texts = windows(ids, ctx, count=count, bos=begins_with(llm))
    replay = Replay(llm.backend, path)
    _read(replay, texts, progress)
    replay.rewind()


def divergence_from(
    llm: LLM, path: Path, ids: Sequence[int], *, ctx: int, count: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Of `llm` from a model that was recorded on the same windows: see pronk.measure.divergence."""
    tokenizer = llm.tokenizer if llm.has_tokenizer else None
    reference = LLM("the reference", llm.checkpoint, tokenizer, Replay.reopened(path, llm.backend), prefix_cache=0)
    return divergence(reference, llm, ids, ctx=ctx, count=count, progress=progress)


def forget(path: Path) -> None:
    path.unlink(missing_ok=True)
    _index(path).unlink(missing_ok=True)


def is_recorded(path: Path) -> bool:
    """Whether all of a recording is there: what was asked for is written when it is over."""
    return path.is_file() and _index(path).is_file()


def _index(path: Path) -> Path:
    return path.with_suffix(".json")


def _read(replay: Replay, texts: Sequence[Window], progress: Progress | None) -> None:
    reader = Reader(replay, max(len(window.ids) for window in texts))
    for window in watched(texts, progress):
        deque(reader.read(window), maxlen=0)


class _Nothing:
    """Keys and values that nobody reads."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

    def resize(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def quiesce(self) -> None:
        pass
