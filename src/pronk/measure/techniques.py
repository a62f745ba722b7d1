"""Techniques: what each of pronk's switches costs and buys, measured on and off.

A point is one setting, run one way, in a process of its own: a peak of memory never sinks again, and what another run
has left behind would count. Ways of one setting are measured one after the other, not in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.measure import latency
from pronk.measure.comparison import options_of, schemes
from pronk.measure.machine import cores
from pronk.measure.worker import Worker

if TYPE_CHECKING:
    from pronk.measure.comparison import Comparison
    from pronk.measure.journal import Journal
    from pronk.measure.pace import Pace

Prompts = list[list[int]]
ROUNDS, SECONDS = 3, 12.0  # of a point: so many runs, or as many as that time allows; one at least
BATCHES = (1, 8, 16)
_START = 100.0  # what starting a process and loading costs, in decoded tokens
_KV_WINDOWS = 2


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


@dataclass(frozen=True)
class Technique:
    name: str
    title: str
    what: str


TECHNIQUES = (
    Technique(
        "kv-cache",
        "KV cache",
        "Keys and values of the text so far are kept. Without them the whole text is computed again for each token: "
        "the same tokens come out.",
    ),
    Technique(
        "flash-attention",
        "Flash attention",
        "Attention in tiles, which never holds the matrix of all scores, against attention written out. One pass over "
        "the whole text. The CPU engine has only the first.",
    ),
    Technique("quantization", "Quantization", "Weights in fewer bits: less to keep, and less to read for each token."),
    Technique(
        "kv-dtype",
        "Type of keys and values",
        "Keys and values in fewer bits. KLD: against the same weights with keys and values in f32.",
    ),
    Technique(
        "prefix-reuse",
        "Prefix reuse",
        "A second text that begins like an earlier one starts from what was kept of it. Seconds: to the first token.",
    ),
    Technique(
        "speculative",
        "Speculative decoding (n-gram)",
        "Tokens are guessed from the text's own past and checked many at a time: the same tokens in fewer passes, "
        "where the text repeats itself.",
    ),
    Technique("threads", "Threads", "The same work on more cores."),
)


def titles(comparison: Comparison) -> list[str]:
    names = {point.technique for point in points(comparison)}
    return [technique.title for technique in TECHNIQUES if technique.name in names]


def costs(comparison: Comparison) -> dict[str, float]:
    return {point.step: point.cost for point in points(comparison)}


def measure(comparison: Comparison, journal: Journal, pace: Pace) -> None:
    for point in points(comparison):
        if point.step in journal.steps:
            continue
        with pace.step(point.step, f"{point.technique}, {point.setting}, {point.way}"), Worker(point.way) as worker:
            journal.record(point.step, _measured(comparison, point, worker))


def _measured(comparison: Comparison, point: Point, worker: Worker) -> dict[str, Any]:
    load: dict[str, Any] = {"model": comparison.model, "engine": point.engine}
    info = worker.call("load", name="own", options=dict(point.options), prefix_cache=point.prefix_cache, **load)
    found = worker.call(
        "timed", name="own", prompts=point.prompts, new=point.new, rounds=ROUNDS, seconds=SECONDS,
        before=point.before and list(point.before), how=dict(point.how),
    )  # fmt: skip
    if None not in (info["baseline"], info["loaded_rss"]):
        found["weights_bytes"] = info["loaded_rss"] - info["baseline"]
    if point.kld and comparison.judged_together:
        worker.call("load", name="f32", options={**point.options, "kv_dtype": "f32"}, **load)
        compared = worker.call(
            "divergences", reference="f32", names=["own"], ids=list(comparison.ids), ctx=comparison.window,
            count=min(_KV_WINDOWS, comparison.windows),
        )  # fmt: skip
        found["kld"] = compared["own"]["mean"]
    return {**found, "threads": info["threads"], "isa": info["isa"]}


def missing(comparison: Comparison) -> list[str]:
    """What is not measured, and why."""
    if not comparison.request.techniques:
        return []
    found = []
    if find_spec("torch") is None:
        found.append("flash against math attention: it needs the torch engine, which is not installed")
    if comparison.engine == "torch":
        found.append("types of keys and values, threads: they are options of the CPU engine")
    return found


def composed(comparison: Comparison, steps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As report.json has them: what has been measured so far."""
    every = list(points(comparison))
    found = []
    for technique in TECHNIQUES:
        settings: dict[str, dict[str, Any]] = {}
        for point in every:
            if point.technique == technique.name and point.step in steps:
                settings.setdefault(point.setting, {})[point.way] = _way(point, steps[point.step])
        if settings:
            found.append(
                {
                    "name": technique.name,
                    "title": technique.title,
                    "what": technique.what,
                    "settings": {
                        "rounds": ROUNDS,
                        "seconds a point, at most": SECONDS,
                        "model": comparison.request.against,
                    },
                    "points": [{"setting": setting, "ways": ways} for setting, ways in settings.items()],
                }
            )
    return found


def _way(point: Point, taken: Mapping[str, Any]) -> dict[str, Any]:
    seconds = latency.summary(taken["seconds"])
    texts, read = len(point.prompts), sum(map(len, point.prompts))
    rates = {
        "prefill": read / seconds["median"],
        "all": texts * point.new / seconds["median"],
        "decode": latency.summary(taken["decode_tok_s"])["median"] if None not in taken["decode_tok_s"] else None,
    }
    notes = []
    if (runs := len(taken["seconds"])) < ROUNDS:
        notes.append(f"{runs} run{'s' if runs > 1 else ''}, for it takes long")
    if taken["drafted"]:
        notes.append(f"{taken['accepted']} of {taken['drafted']} guessed tokens were right")
    if taken["cached"]:
        notes.append(f"{taken['cached']} tokens reused")
    if taken.get("kld") is not None:
        notes.append(f"mean KLD {taken['kld']:.2g}")
    return {
        "seconds": seconds,
        "tok_s": rates[point.rate],
        "peak_bytes": taken["peak_bytes"],
        "weights_bytes": taken.get("weights_bytes"),
        "kld": taken.get("kld"),
        "note": "; ".join(notes) or None,
    }


# -- what is measured --


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
