"""Points: the runs that show what each of pronk's switches does, on and off. How they are measured: techniques.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.measure.machine import cores
from pronk.measure.settling import options_of, schemes

if TYPE_CHECKING:
    from pronk.measure.comparison import Comparison

Prompts = list[list[int]]
ROUNDS, SECONDS = 3, 12.0  # of a point: so many runs, or as many as that time allows; one at least
BATCHES = (1, 8, 16)
_START = 100.0  # what starting a process and loading costs, in decoded tokens


@dataclass(frozen=True)
class Point:
    technique: str
    setting: str
    way: str
    prompts: Prompts
    new: int  # tokens of each
    options: Mapping[str, Any]  # of pronk.load
    engine: str
    rate: Literal["prefill", "decode", "all"]  # tokens a second: of the prompts, of one text, of all texts
    how: Mapping[str, Any] = field(default_factory=dict)  # of LLM.generate
    prefix_cache: int | None = 0
    before: Sequence[int] | None = None
    kld: bool = False  # whether to hold it against the same with keys and values in f32

    @property
    def step(self) -> str:
        return f"technique {self.technique}: {self.setting}: {self.way}"

    @property
    def cost(self) -> float:
        """In decoded tokens, about: see compare.costs."""
        read = sum(map(len, self.prompts))
        if self.how.get("cache") is False:  # all of the text, for each token
            a_run = (self.new * read + len(self.prompts) * self.new**2 / 2) / 10
        else:
            a_run = read / 10 + self.new * (1 + len(self.prompts) / 10)
        return _START + a_run * (ROUNDS if a_run < 500 else 1)


def points(comparison: Comparison) -> Iterator[Point]:
    """All of them, in order: the same ones for the same comparison."""
    original = next(variant for variant in comparison.variants if variant.original)
    plain: dict[str, Any] = {"options": original.options, "engine": comparison.engine}
    yield from _kv_cache(comparison, plain)
    yield from _attention(comparison, plain)
    yield from _quantization(comparison)
    if comparison.engine == "cpu":
        yield from _kv_dtype(comparison, plain)
    yield from _prefix(comparison, plain)
    yield from _speculative(comparison, plain)
    if comparison.engine == "cpu":
        yield from _threads(comparison, plain)


def _kv_cache(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 256, 32)
    for batch in BATCHES:
        prompts = [comparison.piece(read, number) for number in range(batch)]
        for way, cache in (("with", True), ("without", False)):
            setting = f"batch {batch}, input {read}, output {new}"
            yield Point("kv-cache", setting, way, prompts, new, rate="all", how={"cache": cache}, **plain)


def _attention(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    most = min(comparison.ctx_size - 1, len(comparison.ids))
    loading = {key: value for key, value in comparison.request.loading.items() if key != "kv_dtype"}
    name = comparison.request.against if comparison.engine == "torch" else "f32"
    options = options_of(
        name or "f32", "torch", {"device": "cpu", **loading} if comparison.engine == "cpu" else loading
    )
    for tokens in [length for length in (256, 1024, 2048) if length <= most] or [most]:
        one: dict[str, Any] = {
            "technique": "flash-attention", "setting": f"{tokens} tokens", "prompts": [comparison.piece(tokens, 1)],
            "new": 1, "rate": "prefill", "how": {"cache": False},
        }  # fmt: skip
        if find_spec("torch"):
            for attn in ("flash", "math"):
                yield Point(way=f"{attn}, torch engine", options={**options, "attn": attn}, engine="torch", **one)
        if comparison.engine == "cpu":
            yield Point(way="flash, CPU engine", **one, **plain)


def _quantization(comparison: Comparison) -> Iterator[Point]:
    read, new = _room(comparison, 512, 1)
    context, more = _room(comparison, 64, 64)
    for setting, tokens, count in ((f"prefill {read}", read, new), (f"decode {more} after {context}", context, more)):
        for name in schemes(comparison.engine):
            if name == "auto":
                continue
            options = options_of(name, comparison.engine, comparison.request.loading)
            rate: Literal["prefill", "decode"] = "prefill" if count == 1 else "decode"
            yield Point(
                "quantization", setting, name, [comparison.piece(tokens, 2)], count, options, comparison.engine, rate
            )


def _kv_dtype(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 512, 32)
    prompts = [comparison.piece(read, number) for number in range(8)]
    options = {key: value for key, value in plain["options"].items() if key != "kv_dtype"}
    for name in ("f32", "bf16", "f16", "int8"):
        yield Point(
            "kv-dtype", f"batch 8, input {read}, output {new}", name, prompts, new, {**options, "kv_dtype": name},
            plain["engine"], "all", kld=True,
        )  # fmt: skip


def _prefix(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, _ = _room(comparison, 512 + BLOCK_SIZE, 1)
    shared = (read - 1) // BLOCK_SIZE * BLOCK_SIZE  # whole blocks are kept
    if not shared:
        return
    own = min(32, read - shared)
    first, second = comparison.piece(shared + own, 3), comparison.piece(shared + own, 4)
    second = [*first[:shared], *second[shared:]]
    for way, kept in (("with", None), ("without", 0)):
        yield Point(
            "prefix-reuse", f"{shared} tokens in common, {own} of its own", way, [second], 1, rate="prefill",
            prefix_cache=kept, before=first, **plain,
        )  # fmt: skip


def _speculative(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 256, 64)
    phrase = comparison.piece(max(read // 8, 1), 5)
    for setting, prompt in (("a text that repeats itself", (phrase * 8)[:read]), ("prose", comparison.piece(read, 6))):
        ways: tuple[tuple[str, dict[str, Any]], ...] = (("with", {"speculative": "ngram"}), ("without", {}))
        for way, how in ways:
            yield Point("speculative", setting, way, [prompt], new, rate="decode", how=how, **plain)


def _threads(comparison: Comparison, plain: Mapping[str, Any]) -> Iterator[Point]:
    read, new = _room(comparison, 512, 1)
    context, more = _room(comparison, 64, 64)
    counts = sorted({1, *(2**n for n in range(1, 10) if 2**n <= cores()), cores()})
    for setting, tokens, count in ((f"prefill {read}", read, new), (f"decode {more} after {context}", context, more)):
        for threads in counts:
            options = {**plain["options"], "threads": threads}
            rate: Literal["prefill", "decode"] = "prefill" if count == 1 else "decode"
            way = f"{threads} thread{'s' if threads > 1 else ''}"
            yield Point("threads", setting, way, [comparison.piece(tokens, 2)], count, options, plain["engine"], rate)


def _room(comparison: Comparison, read: int, new: int) -> tuple[int, int]:
    """As many tokens to read and to write, or what the context and the text have room for."""
    new = max(1, min(new, comparison.ctx_size // 4))
    return max(1, min(read, comparison.ctx_size - new, len(comparison.ids))), new
