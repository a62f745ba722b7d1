"""Points: the runs that show what each of pronk's switches does, on and off. How they are measured: techniques.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pronk import engines
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.formats import KV_TYPES
from pronk.measure.settling import options_of
from pronk.system import processors

if TYPE_CHECKING:
    from pronk.measure.comparison import Comparison

Prompts = list[list[int]]
SECONDS = 12.0  # of a point's runs together: fewer of them where they take longer, but one at least
BATCHES = (1, 8, 16)
LENGTHS, LENGTHS_NEW = (32, 128, 512, 1024, 2048), 8  # tokens of a prompt, and those that are written after it
LENGTHS_BATCHES = (1, 8)
PIECES = 10  # of the text, that speculation is measured on: how much it guesses right is the text's doing
_START, _QUALITY = 100.0, 2000.0  # what loading costs, and a divergence, about, in decoded tokens
Rate = Literal["prompt_tok_s", "decode_tok_s", "all_tok_s"]  # tokens a second: see techniques.RATES


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
        """In decoded tokens, about: see compare.costs."""
        a_run = self.tokens / 10 + (0 if self.how.get("cache") is False else self.new)
        return _START + a_run * (len(self.texts) if a_run < 500 else 1) + (_QUALITY if self.reference else 0)


def points(comparison: Comparison) -> Iterator[Point]:
    """All of them, in order: the same ones for the same comparison."""
    original = next(variant for variant in comparison.variants if variant.original)
    plain: dict[str, Any] = {"options": original.options, "engine": comparison.engine}
    engine = engines.named(comparison.engine)
    yield from _kv_cache(comparison, plain)
    yield from _lengths(comparison, plain)
    yield from _attention(comparison, plain)
    yield from _quantization(comparison)
    if "kv_dtype" in engine.options:
        yield from _kv_dtype(comparison, plain)
    yield from _prefix(comparison, plain)
    yield from _speculative(comparison, plain)
    if engine.devices == ("cpu",):
        yield from _threads(comparison, plain)


def _kv_cache(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 256, 32)
    for batch in BATCHES:
        for way, cache in (("with", True), ("without", False)):
            setting = f"batch {batch}, input {read}, output {new}"
            texts = _texts(comparison, read, batch)
            yield Point("kv-cache", setting, way, texts, new, rate="all_tok_s", how={"cache": cache}, **plain)


def _lengths(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    """Of the text so far: work without a cache grows with it, and so do keys and values with one."""
    most = min(comparison.ctx_size - LENGTHS_NEW, len(comparison.ids))
    for batch in LENGTHS_BATCHES:
        for tokens in [length for length in LENGTHS if length <= most] or [most]:
            for way, cache in (("with", True), ("without", False)):
                yield Point(
                    f"kv-cache-length-{batch}", f"{tokens} tokens", way, _texts(comparison, tokens, batch), LENGTHS_NEW,
                    rate="all_tok_s", how={"cache": cache}, **plain,
                )  # fmt: skip


def _attention(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    most = min(comparison.ctx_size - 1, len(comparison.ids))
    loading = {key: value for key, value in comparison.request.loading.items() if key != "kv_dtype"}
    has_both = "attn" in engines.named(comparison.engine).options
    name = comparison.request.against if has_both else "f32"
    options = options_of(name or "f32", "torch", loading if has_both else {"device": "cpu", **loading})
    lengths = [length for length in (256, 1024, 2048) if length <= most] or [most]
    for tokens in lengths:
        one: dict[str, Any] = {
            "technique": "flash-attention", "setting": f"{tokens} tokens", "texts": _texts(comparison, tokens),
            "new": 1, "rate": "prompt_tok_s", "how": {"cache": False},
        }  # fmt: skip
        first = tokens == lengths[0]  # what attention does to the predictions is measured once
        if find_spec("torch"):
            for attn in ("flash", "math"):
                written_out = ("torch", {**options, "attn": "math"}) if first else None
                yield Point(way=f"{attn}, torch engine", options={**options, "attn": attn}, engine="torch",
                            reference=written_out, **one)  # fmt: skip
        if not has_both:
            yield Point(way="flash, CPU engine", reference=_exact(comparison) if first else None, **one, **plain)


def _quantization(comparison: Comparison) -> Iterator[Point]:
    read, new = _room(comparison, 512, 1)
    context, more = _room(comparison, 64, 64)
    for setting, tokens, count in ((f"prefill {read}", read, new), (f"decode {more} after {context}", context, more)):
        for name in engines.named(comparison.engine).formats:
            if name == "auto":
                continue
            options = options_of(name, comparison.engine, comparison.request.loading)
            yield Point(
                "quantization", setting, name, _texts(comparison, tokens), count, options, comparison.engine,
                _rate(count), reference=_exact(comparison) if count == 1 else None,
            )  # fmt: skip


def _kv_dtype(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 512, 32)
    texts = _texts(comparison, read, 8)
    options = {key: value for key, value in plain["options"].items() if key != "kv_dtype"}
    for name in KV_TYPES:
        yield Point(
            "kv-dtype", f"batch 8, input {read}, output {new}", name, texts, new, {**options, "kv_dtype": name},
            plain["engine"], "all_tok_s", reference=("cpu", {**options, "kv_dtype": "f32"}),
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
            yield Point(
                "speculative",
                f"{pieces} {kind}",
                way,
                texts,
                new,
                rate="decode_tok_s",
                how=how,
                seconds=math.inf,
                **plain,
            )


def _threads(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 512, 1)
    context, more = _room(comparison, 64, 64)
    counts = sorted({1, *(2**n for n in range(1, 10) if 2**n <= processors()), processors()})
    for setting, tokens, count in ((f"prefill {read}", read, new), (f"decode {more} after {context}", context, more)):
        for threads in counts:
            options = {**plain["options"], "threads": threads}
            way, texts = f"{threads} thread{'s' if threads > 1 else ''}", _texts(comparison, tokens)
            yield Point("threads", setting, way, texts, count, options, plain["engine"], _rate(count))


def _texts(comparison: Comparison, tokens: int, batch: int = 1, runs: int | None = None) -> list[Prompts]:
    """Pieces of the text: of each run, so many side by side; others in each, for what a text does is no rule."""
    return [
        [comparison.piece(tokens, run * batch + n) for n in range(batch)] for run in range(runs or comparison.rounds)
    ]


def _exact(comparison: Comparison) -> tuple[str, Mapping[str, Any]]:
    """Weights in f32, and keys and values, too."""
    plain = {key: value for key, value in comparison.request.loading.items() if key != "kv_dtype"}
    return comparison.engine, options_of("f32", comparison.engine, plain)


def _rate(new: int) -> Rate:
    return "prompt_tok_s" if new == 1 else "decode_tok_s"


def _room(comparison: Comparison, read: int, new: int) -> tuple[int, int]:
    """As many tokens to read and to write, or what the context and the text have room for."""
    new = max(1, min(new, comparison.ctx_size // 4))
    return max(1, min(read, comparison.ctx_size - new, len(comparison.ids))), new
