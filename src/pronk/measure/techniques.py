"""Techniques: what each of pronk's switches costs and buys, measured on and off.

A point is one setting, run one way, in a process of its own: a peak of memory never sinks again, and what another run
has left behind would count. Ways of one setting are measured one after the other, not in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pronk.measure import latency
from pronk.measure.points import ROUNDS, SECONDS, Point, points
from pronk.measure.worker import Worker

if TYPE_CHECKING:
    from pronk.measure.comparison import Comparison
    from pronk.measure.journal import Journal
    from pronk.measure.pace import Pace

_KV_WINDOWS = 2


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
    found["weights_bytes"] = info["weights_bytes"]
    if None not in (info["baseline"], info["loaded_rss"]):
        found["loading_took"] = info["loaded_rss"] - info["baseline"]
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
        "loading_took": taken.get("loading_took"),
        "kld": taken.get("kld"),
        "note": "; ".join(notes) or None,
    }
