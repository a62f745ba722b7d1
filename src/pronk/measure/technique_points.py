"""Points of techniques: the runs that show what each of pronk's switches does, on and off (see techniques.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from pronk import engines
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.formats import KV_TYPES
from pronk.measure.comparison import Comparison
from pronk.measure.settle import exact_options, options_of
from pronk.system import processors

Prompts = list[list[int]]
SECONDS = 12.0  # of a point's runs together: fewer of them where they take longer, but one at least
BATCHES = (1, 8, 16)
LENGTHS, LENGTHS_NEW = (32, 128, 512, 1024, 2048), 8  # tokens of a prompt, and those that are written after it
LENGTHS_BATCHES = (1, 8)
PIECES = 10  # of the text, that speculation is measured on: how much it guesses right is the text's doing
_START, _QUALITY = 100.0, 2000.0  # what loading costs, and a divergence, about, in decoded tokens
# Tokens a second: of the prompt, until the first new one; of one text, after its first; of all texts, of all the time.
Rate = Literal["prompt_tok_s", "decode_tok_s", "all_tok_s"]


@dataclass(frozen=True)
class Point:
    technique: str
    setting: str
    way: str
    texts: Sequence[Prompts]  # of each run: what is read side by side, another piece of the text each time
    new: int  # tokens of each
    options: Mapping[str, Any]  # of pronk.load
    engine: str
    rate: Rate
    how: Mapping[str, Any] = field(default_factory=dict)  # of LLM.generate
    prefix_cache: int | None = 0
    before: Sequence[Sequence[int]] | None = None  # of each run: a text that is read first and not timed
    reference: tuple[str, Mapping[str, Any]] | None = None  # engine and options of what its quality is held against
    seconds: float = SECONDS

    @property
    def step(self) -> str:
        return f"technique {self.technique}: {self.setting}: {self.way}"

    @property
    def tokens(self) -> int:
        """That are computed in a run."""
        prompts = self.texts[0]
        read, again = sum(map(len, prompts)), len(prompts) * (self.new - 1)
        if self.how.get("cache") is False:  # all of the text, for each token
            return self.new * read + self.new * again // 2
        return read + again

    @property
    def cost(self) -> float:
        """In decoded tokens, about."""
        a_run = self.tokens / 10 + (0 if self.how.get("cache") is False else self.new)
        return _START + a_run * (len(self.texts) if a_run < 500 else 1) + (_QUALITY if self.reference else 0)


def points(comparison: Comparison) -> Iterator[Point]:
    """All of them, in order: the same ones for the same comparison."""
    plain: dict[str, Any] = {"options": comparison.original.options, "engine": comparison.engine}
    engine = engines.named(comparison.engine)
    yield from _kv_cache(comparison, plain)
    yield from _attention(comparison, plain)
    yield from _quantization(comparison)
    if "kv_dtype" in engine.options:
        yield from _kv_dtype(comparison, plain)
    yield from _prefix(comparison, plain)
    yield from _speculative(comparison, plain)
    if engine.devices == ("cpu",):
        yield from _threads(comparison, plain)


def _kv_cache(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    """Against the length of the text so far as well: work without a cache grows with it, and so do keys and values."""
    read, new = _room(comparison, 256, 32)
    most = min(comparison.ctx_size - LENGTHS_NEW, len(comparison.ids))
    lengths = [length for length in LENGTHS if length <= most] or [most]
    settings = [
        *(("kv-cache", f"batch {batch}, input {read}, output {new}", batch, read, new) for batch in BATCHES),
        *((f"kv-cache-length-{batch}", f"{tokens} tokens", batch, tokens, LENGTHS_NEW)
          for batch in LENGTHS_BATCHES for tokens in lengths),
    ]  # fmt: skip
    for technique, setting, batch, tokens, count in settings:
        for way, cache in (("with", True), ("without", False)):
            texts = _texts(comparison, tokens, batch)
            yield Point(technique, setting, way, texts, count, rate="all_tok_s", how={"cache": cache}, **plain)


def _attention(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    most = min(comparison.ctx_size - 1, len(comparison.ids))
    on_cpu = "attn" not in engines.named(comparison.engine).options
    loading = {key: value for key, value in comparison.request.loading.items() if key != "kv_dtype"}
    exactly = exact_options(comparison.engine, loading)
    name = "f32" if on_cpu else comparison.original.name
    options = options_of(name, "torch", {"device": "cpu", **loading} if on_cpu else loading)
    lengths = [length for length in (256, 1024, 2048) if length <= most] or [most]
    for tokens in lengths:
        first = tokens == lengths[0]  # what attention does to the predictions is measured once
        ways = []
        for attn in ("flash", "math") if find_spec("torch") else ():
            ways.append((f"{attn}, torch engine", "torch", {**options, "attn": attn}, {**options, "attn": "math"}))
        if on_cpu:
            ways.append(("flash, CPU engine", comparison.engine, plain["options"], exactly))
        for way, engine, own, exact in ways:
            yield Point(
                "flash-attention", f"{tokens} tokens", way, _texts(comparison, tokens), 1, own, engine, "prompt_tok_s",
                how={"cache": False}, reference=(engine, exact) if first else None,
            )  # fmt: skip


def _quantization(comparison: Comparison) -> Iterator[Point]:
    exact = comparison.engine, exact_options(comparison.engine, comparison.request.loading)
    for setting, tokens, new, rate in _prefill_and_decode(comparison):
        for name in engines.named(comparison.engine).formats:
            if name != "auto":
                options = options_of(name, comparison.engine, comparison.request.loading)
                yield Point(
                    "quantization", setting, name, _texts(comparison, tokens), new, options, comparison.engine, rate,
                    reference=exact if new == 1 else None,
                )  # fmt: skip


def _kv_dtype(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 512, 32)
    for name in KV_TYPES:
        own, exact = ({**plain["options"], "kv_dtype": kv} for kv in (name, "f32"))
        yield Point(
            "kv-dtype", f"batch 8, input {read}, output {new}", name, _texts(comparison, read, 8), new, own,
            plain["engine"], "all_tok_s", reference=(comparison.engine, exact),
        )  # fmt: skip


def _prefix(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, _ = _room(comparison, 512 + BLOCK_SIZE, 1)
    shared = (read - 1) // BLOCK_SIZE * BLOCK_SIZE  # whole blocks are kept
    if not shared:
        return
    own = min(32, read - shared)
    firsts, seconds = [], []
    for number in range(comparison.rounds):
        first, other = (comparison.piece(shared + own, 2 * number + n) for n in (3, 4))
        firsts.append(first)
        seconds.append([[*first[:shared], *other[shared:]]])
    for way, kept in (("with", None), ("without", 0)):
        yield Point(
            "prefix-reuse", f"{shared} tokens in common, {own} of its own", way, seconds, 1, rate="prompt_tok_s",
            prefix_cache=kept, before=firsts, **plain,
        )  # fmt: skip


def _speculative(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 256, 64)
    pieces = max(PIECES, comparison.rounds)
    phrases = [comparison.piece(max(read // 8, 1), number) for number in range(pieces)]
    repeated, prose = [[(phrase * 8)[:read]] for phrase in phrases], _texts(comparison, read, runs=pieces)
    ways: tuple[tuple[str, dict[str, Any]], ...] = (("with", {"speculative": "ngram"}), ("without", {}))
    for kind, texts in (("texts that repeat themselves", repeated), ("pieces of prose", prose)):
        for way, how in ways:
            setting = f"{pieces} {kind}"
            yield Point(
                "speculative", setting, way, texts, new, rate="decode_tok_s", how=how, seconds=math.inf, **plain
            )


def _threads(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    counts = sorted({1, *(2**n for n in range(1, 10) if 2**n <= processors()), processors()})
    for setting, tokens, new, rate in _prefill_and_decode(comparison):
        for threads in counts:
            options = {**plain["options"], "threads": threads}
            way, texts = f"{threads} thread{'s' if threads > 1 else ''}", _texts(comparison, tokens)
            yield Point("threads", setting, way, texts, new, options, plain["engine"], rate)


def _prefill_and_decode(comparison: Comparison) -> list[tuple[str, int, int, Rate]]:
    """Settings: their names, tokens of the prompt, new ones, and the rate that is of interest."""
    read, new = _room(comparison, 512, 1)
    context, more = _room(comparison, 64, 64)
    rate: Rate = "prompt_tok_s" if more == 1 else "decode_tok_s"
    return [(f"prefill {read}", read, new, "prompt_tok_s"), (f"decode {more} after {context}", context, more, rate)]


def _texts(comparison: Comparison, tokens: int, batch: int = 1, runs: int | None = None) -> list[Prompts]:
    """Pieces of the text: of each run, so many side by side; others in each, for what a text does is no rule."""
    return [
        [comparison.piece(tokens, run * batch + n) for n in range(batch)] for run in range(runs or comparison.rounds)
    ]


def _room(comparison: Comparison, read: int, new: int) -> tuple[int, int]:
    """As many tokens to read and to write, or what the context and the text have room for."""
    new = max(1, min(new, comparison.ctx_size // 4))
    return max(1, min(read, comparison.ctx_size - new, len(comparison.ids))), new
