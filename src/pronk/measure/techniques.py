"""Techniques: what each of pronk's switches costs and buys, measured on and off.

A point is one setting, run one way, in a process of its own: a peak of memory never sinks again, and what another run
has left behind would count. Ways of one setting are measured one after the other, not in turns, on the same pieces of
the text, another piece in each run; and none without its quality: how far its predictions lie from a reference's, or,
where a technique is to change nothing, how many texts come out the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pronk import engines
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.measure import latency
from pronk.measure.comparison import Comparison, kv_blocks
from pronk.measure.divergence import divergence, noise_floor
from pronk.measure.journal import Step
from pronk.measure.operations import Loading, load, loaded, timed
from pronk.measure.technique_points import LENGTHS_BATCHES, LENGTHS_NEW, SECONDS, Point, points
from pronk.measure.worker import Held, asks

# By name: a title, and what it is.
TECHNIQUES = {
    "kv-cache": (
        "KV cache",
        "Keys and values of the text so far are kept. Without them the whole text is computed again for each token: "
        "the same tokens come out.",
    ),
    **{
        f"kv-cache-length-{batch}": (
            f"KV cache against the length of {texts}",
            f"{LENGTHS_NEW} tokens written after a prompt of each length. Theory: without a cache n tokens after P "
            "take nP + n(n - 1)/2 tokens of work, with one P + n - 1; either way n passes. What a pass costs, and a "
            "token, is fitted to all of the measured times. Keys and values: of all tokens; where a cache grows, the "
            "old one stays until it is copied, and theory's peak counts both.",
        )
        for batch, texts in zip(LENGTHS_BATCHES, ("a text", "eight texts side by side"), strict=True)
    },
    "flash-attention": (
        "Flash attention",
        "Attention in tiles, which never holds the matrix of all scores, against attention written out. One pass over "
        "the whole text. The CPU engine has only the first. KLD: on the torch engine to attention written out, on the "
        "CPU engine to f32.",
    ),
    "quantization": (
        "Quantization",
        "Weights in fewer bits: less to keep, and less to read for each token. KLD: to weights, keys and values in "
        "f32.",
    ),
    "kv-dtype": (
        "Type of keys and values",
        "Keys and values in fewer bits. KLD: against the same weights with keys and values in f32.",
    ),
    "prefix-reuse": (
        "Prefix reuse",
        "A second text that begins like an earlier one starts from what was kept of it. Seconds: to the first token.",
    ),
    "speculative": (
        "Speculative decoding (n-gram)",
        "Tokens are guessed from the text's own past and checked many at a time: the same tokens in fewer passes, "
        "where the text repeats itself. How often it does is the text's doing, hence the spread over texts.",
    ),
    "threads": ("Threads", "The same work on more cores."),
}


def titles(comparison: Comparison) -> list[str]:
    names = {point.technique for point in points(comparison)}
    return [title for name, (title, _) in TECHNIQUES.items() if name in names]


def steps(comparison: Comparison) -> list[Step]:
    """One a point, each in a process of its own."""
    text: dict[str, Any] = {"ids": list(comparison.ids), "ctx": comparison.window}
    found = []
    for point in points(comparison):
        reference = point.reference if comparison.judged_together else None
        measure = asks(
            _measured,
            how=Loading(comparison.model, point.engine, point.options, point.prefix_cache),
            reference=reference and Loading(comparison.model, *reference),
            text=text, windows=(comparison.windows, comparison.noise_windows),
            texts=point.texts, new=point.new, seconds=point.seconds, before=point.before, called=point.how,
        )  # fmt: skip
        what = f"{point.technique}, {point.setting}, {point.way}"
        found.append(Step(point.step, what, point.cost, point.way, point.step, measure))
    return found


def _measured(
    held: Held, how: Loading, reference: Loading | None, text: dict[str, Any], windows: tuple[int, int], **runs: Any
) -> dict[str, Any]:
    """In a worker, whose own memory is the point's until a reference is loaded beside it."""
    llm, about = loaded(held, how)
    found = timed(llm, **runs)
    found["weights_bytes"] = about["weights_bytes"]
    if None not in (about["baseline"], about["loaded_rss"]):
        found["loading_took"] = about["loaded_rss"] - about["baseline"]
    if reference:
        same = (reference.engine, reference.options) == (how.engine, how.options)
        beside = llm if same else load(reference)
        found["divergence"] = divergence(beside, llm, **text, count=windows[0])
        found["noise_floor"] = noise_floor(llm, **text, count=windows[1])
    return {**found, "threads": about["threads"], "isa": about["isa"]}


def missing(comparison: Comparison) -> list[str]:
    """What is not measured, and why."""
    if not comparison.request.techniques:
        return []
    found = []
    if find_spec("torch") is None:
        found.append("flash against math attention: it needs the torch engine, which is not installed")
    if "kv_dtype" not in engines.named(comparison.engine).options:
        found.append("types of keys and values, threads: they are options of the CPU engine")
    if not comparison.judged_together:
        found.append("divergence of techniques: two models do not fit into memory side by side")
    return found


def composed(comparison: Comparison, steps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As report.json has them: what has been measured so far."""
    every = list(points(comparison))
    settings = {
        "runs": comparison.rounds,
        "fewer where they take more seconds than": SECONDS,
        "model": comparison.request.against,
    }
    found = []
    for technique, (title, what) in TECHNIQUES.items():
        ways: dict[str, dict[str, Any]] = {}
        first: dict[str, Any] = {}
        expected = theory(comparison, technique, every, steps)
        for point in every:
            if point.technique == technique and (taken := steps.get(point.step)) is not None:
                way = _way(point, taken, first.setdefault(point.setting, taken))
                ways.setdefault(point.setting, {})[point.way] = {**way, **expected.get(point.step, {})}
        if ways:
            measured = [{"setting": setting, "ways": of} for setting, of in ways.items()]
            about = {"name": technique, "title": title, "what": what, "settings": settings}
            found.append({**about, "points": measured})
    return found


def theory(
    comparison: Comparison, technique: str, every: Sequence[Point], steps: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Of the points of a technique against length, by step: the time that their work would take if every pass cost
    the same and every token in it, too, and the bytes of keys and values."""
    import numpy as np

    measured = [point for point in every if point.technique == technique and point.step in steps]
    if not technique.startswith("kv-cache-length") or len(measured) < 3:
        return {}
    a_token = comparison.original.predicted.kv_a_token
    work = np.array([(point.new, point.tokens) for point in measured], float)  # passes, tokens
    seconds = np.array([latency.summary(steps[point.step]["seconds"])["median"] for point in measured])
    # Relative errors count alike, be it milliseconds or minutes.
    cost = np.linalg.lstsq(work / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    if cost.min() < 0:  # a pass that costs nothing by itself
        cost = np.array([0.0, 1 / float(np.mean(work[:, 1] / seconds))])
    found = {}
    for point, expected in zip(measured, work @ cost, strict=True):
        batch, length = len(point.texts[0]), len(point.texts[0][0]) + point.new
        remembers = point.how.get("cache") is not False
        layers = 1 if remembers else comparison.checkpoint.config.num_hidden_layers  # without: one at a time
        blocks = kv_blocks(length, batch) if remembers else batch * -(-length // BLOCK_SIZE)
        found[point.step] = {
            "theory_s": float(expected),
            "kv_bytes": batch * length * a_token // layers,
            "theory_kv_peak": blocks * BLOCK_SIZE * a_token // layers,
        }
    return found


def _way(point: Point, taken: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """`base`: what the first way of the same setting took."""
    seconds, prompts = taken["seconds"], point.texts[0]
    rates: dict[str, list[Any]] = {
        "prompt_tok_s": [sum(map(len, prompts)) / one for one in seconds],
        "all_tok_s": [len(prompts) * point.new / one for one in seconds],
        "decode_tok_s": taken["decode_tok_s"],
    }
    rate = rates[point.rate]
    kld, floor = taken.get("divergence"), taken.get("noise_floor")
    pairs = list(zip(taken["outputs"], base["outputs"], strict=False))  # of the runs that both had time for
    notes = []
    if (runs := len(seconds)) < len(point.texts):
        notes.append(f"{runs} run{'s' if runs > 1 else ''}, for it takes long")
    if taken["drafted"]:
        notes.append(f"{taken['accepted']} of {taken['drafted']} guessed tokens were right")
    if taken["cached"]:
        notes.append(f"{taken['cached']} tokens reused")
    return {
        "seconds": latency.summary(seconds),
        **({point.rate: latency.summary(rate)} if rate and None not in rate else {}),
        "peak_bytes": taken["peak_bytes"],
        "weights_bytes": taken.get("weights_bytes"),
        "loading_took": taken.get("loading_took"),
        "grew_by": None if None in (taken["peak_bytes"], taken.get("held")) else taken["peak_bytes"] - taken["held"],
        "kld": kld and kld["mean"],
        "kld_error": kld and kld["standard_error"],
        "kld_windows": kld and kld["windows"],
        "noise_floor": floor and floor["mean"],
        "same_texts": sum(x == y for own, others in pairs for x, y in zip(own, others, strict=True)),
        "texts": sum(len(own) for own, _ in pairs),
        "note": "; ".join(notes) or None,
    }
