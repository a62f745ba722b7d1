"""Schema: what report.json and training.json hold, in `shapes`. All that reads one of them asks here, once, and nothing
behind it asks again; a report under way lacks parts, and may. A figure that is no number is null.

Bytes, milliseconds (`_ms`), seconds (`_s`, "seconds") and tokens a second (`tok_s`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pronk import strict_json
from pronk.errors import BadFile, short
from pronk.measure import shapes
from pronk.measure.shapes import Either, Maybe, Named, Number, Rule, Text

SCHEMA = 1
LENGTHS = 32  # of prompts, at most: rows of a table and places on an axis
_DRAWN = 64  # of other things that pictures show, at most

NUMBER, POSITIVE, SIZE, SHARE = Number(), Number(least=1e-15), Number(least=0), Number(0, 1)
WRITING = Text(1 << 20)  # what a model wrote, or was asked


def each(names: str, shape: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), shape)


def _summary(unit: Number) -> Rule:
    return Rule(
        {**each("median min max", unit), "rounds": [unit]},
        lambda found: found["min"] <= found["median"] <= found["max"],
        "a summary whose median is not between its min and max",
    )


SUMMARY = _summary(POSITIVE)
HISTOGRAM = Rule(
    {"edges": [Number(-100, 100), 1001], "counts": [int, 1000]},  # edges: log10
    lambda found: len(found["edges"]) == len(found["counts"]) + 1 and all(a < b for a, b in pairwise(found["edges"])),
    "a histogram whose edges do not ascend, one more than there are counts",
)
DIVERGENCE = {
    **each("mean median p99 max standard_error", Maybe(SIZE)),  # of a single window there is no error
    **each("top1 rms_dp", Maybe(SHARE)), "rows": int, "histogram": HISTOGRAM,
    "per_window": Maybe({
        **each("begin rows", [int]), "kld": [SIZE], "top1": [SHARE],
        **each("reference_surprise own_surprise", [NUMBER]),
    }),
}  # fmt: skip
PERPLEXITY = {
    "value": Maybe(Number(1e-15, 1e300)), "standard_error": Maybe(SIZE), "rows": int, "protocol": Maybe(str),
    "beside_original": Maybe({"log_ratio": NUMBER, "standard_error": Maybe(SIZE), "clear": Maybe(bool)}),  # paired
    "per_window": Maybe({**each("begin rows", [int]), "surprise": [NUMBER]}),
}  # fmt: skip
_STYLE = each("distinct_1 distinct_2 repetition", Maybe(SHARE))
WRITTEN = {
    "first_divergence": SIZE, "first_divergences": [Maybe(int)], "identical": int, "equal_share": SHARE, **_STYLE,
    "reference": Maybe(_STYLE),
}  # fmt: skip
QUALITY = {
    "perplexity": Maybe(PERPLEXITY),
    "divergence": Maybe(DIVERGENCE),
    "noise_floor": Maybe({**DIVERGENCE, "how": str}),
    "texts": Maybe(each("greedy seeded", WRITTEN)),
}
MEMORY = {
    **each("weights_predicted kv_a_token", int),
    **each("weights_measured total_predicted baseline_rss loaded_rss peak_rss peak_device", Maybe(int)),
    "loading_took": Maybe(NUMBER),  # a difference
}
LATENCY = {
    **each("load_s ttft_ms", SUMMARY), "ttft_tokens": int, "itl_ms": each("p50 p90 p99 mean", SUMMARY),
    "prefill": [{"tokens": int, **each("tok_s ttft_ms", SUMMARY)}, LENGTHS],
    "decode": [{"context": int, "tok_s": SUMMARY}, LENGTHS],
}  # fmt: skip
METRIC = {
    "value": NUMBER, "better": ("higher", "lower"), "standard_error": Maybe(SIZE),
    "beside_original": Maybe({"difference": NUMBER, "standard_error": Maybe(SIZE)}),
}  # fmt: skip
VARIANT = {
    "name": str, "original": bool, "twin": Maybe(bool), "options": Named(most=_DRAWN), "dtype": Maybe(str),
    "memory": MEMORY, "latency": Maybe(LATENCY), "quality": QUALITY,
    "tasks": Maybe(Named({"chat": bool, "questions": int, "metrics": Named(METRIC, 16)}, _DRAWN)),
}  # fmt: skip
WAY = {
    "seconds": SUMMARY,
    **each("peak_bytes weights_bytes kld kld_error noise_floor theory_s", Maybe(SIZE)),
    **each("grew_by loading_took", Maybe(NUMBER)),  # differences
    **each("kv_bytes theory_kv_peak kld_windows same_texts texts", Maybe(int)),
    **each("prompt_tok_s decode_tok_s all_tok_s", Maybe(SUMMARY)),
    "tok_s": Maybe(POSITIVE),
    "note": Maybe(str),
}
TECHNIQUE = {
    **each("name title what", str), "settings": Maybe(Named(most=_DRAWN)),
    "points": [{"setting": str, "ways": Named(WAY)}, _DRAWN],
}  # fmt: skip
_HEAD = {"schema": int, **each("pronk made command", str), "finished": bool, "steps": Named()}
_MACHINE = {**each("cpu system python", str), "cores": int, **each("memory_bytes threads load", Maybe(SIZE))}
PROVENANCE = Maybe(
    {"commit": Maybe(str), "versions": Named(Maybe(str)), "model_sha256": Named(str), "text_sha256": Maybe(str)}
)
REPORT = {
    **_HEAD,
    "missing": [str, _DRAWN],
    "model": {
        **each("name path format", str), "quantization": Maybe(str), **each("parameters stored_bytes", int),
        "config": Named(),
        "grid": Maybe({"bits": int, "share": SHARE, **each("stored formats", [str]), "exact": bool, "words": str}),
    },
    "machine": {**_MACHINE, "isa": Maybe(str)},
    "settings": {
        "prefill": Maybe([int, LENGTHS]),  # what variants are compared on; techniques alone have lengths of their own
        "decode": Maybe({"contexts": [int, LENGTHS], "tokens": int}),
        "text": str, **each("rounds windows window_tokens", int), **each("text_sha256 reference", Maybe(str)),
        **each("text_tokens noise_windows prompts new_tokens seed", Maybe(int)),
    },
    "variants": [VARIANT, 16],
    "texts": [{"prompt": WRITING, "mode": str, "outputs": Named(WRITING, 16)}, 1000],
    "techniques": Maybe(Rule(
        [TECHNIQUE, 10],
        lambda found: sum(len(point["ways"]) for one in found for point in one["points"]) <= 128,
        "more than 128 ways, which pictures have no room for",
    )),
    "provenance": PROVENANCE,
}  # fmt: skip
KINDS = ("parameters", "activations", "gradients", "optimizer")  # of memory
_POINT = {"name": str, "planned_bytes": Maybe(int)}
_TENSORS = Maybe(dict.fromkeys((*KINDS, "logits"), int))
_MEASURED = {
    "seconds": SUMMARY, **each("tokens tok_s", POSITIVE), "peak_bytes": _summary(SIZE), "trained_share": SHARE,
    "loss": each("first last", Maybe(NUMBER)), **each("bytes at_peak", _TENSORS), "flops": Maybe(SIZE),
}  # fmt: skip
_CHANGE = {"times": Maybe(SIZE), "arrow": ("↑", "↓", "=", "?")}
TRAINING = {
    **_HEAD,
    "model": {"name": str},
    "machine": {**_MACHINE, **each("device torch", Maybe(str))},
    "settings": {
        **each("model sha256", str), **each("tokens rounds rank", int), **each("data device", Maybe(str)),
        "threads": Maybe(int),
    },
    "provenance": PROVENANCE,
    "lengths": Rule([int], bool, "an empty list"),
    "timed_steps": int,
    "points": [Either("out_of_memory", {**_POINT, "out_of_memory": str}, {**_POINT, **_MEASURED}), _DRAWN],
    "techniques": [
        {"name": str, "changes": Maybe(dict.fromkeys((*KINDS, "peak", "compute", "time"), _CHANGE))}, _DRAWN
    ],
}  # fmt: skip

# Control characters but newlines and tabs, what turns the direction of writing, halves of surrogates, and what is no
# character: XML may not hold them, or no reader sees them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def problems(report: Any, shape: Any = REPORT) -> Iterator[str]:
    """Every place where `report` is not as `shape` has it, in words; none of a sound one."""
    return shapes.problems(report, shape, "report")


def read(path: Path, shape: Any = REPORT, *, anew: str) -> dict[str, Any]:
    """The report that a file holds, which is as `shape` has it. Raises BadFile, with `anew` as the way out."""
    try:
        report = strict_json.read(path, paths=True)
        if report.get("schema") != SCHEMA:
            found = short(report.get("schema"))
            raise BadFile(path, f"is no report of this version of pronk: its schema is {found} and not {SCHEMA}")
        for problem in problems(report, shape):
            raise BadFile(path, f"is damaged: {problem}")
    except BadFile as error:
        raise BadFile(path, f"{error.problem}; {anew}", field=error.field, offset=error.offset) from None
    return report


def visible(given: Any) -> Any:
    """A report as it may be drawn: what cannot be seen in its texts is shown by its number."""
    if isinstance(given, str):
        return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), given)
    if isinstance(given, dict):
        return {visible(key): visible(value) for key, value in given.items()}
    return [visible(value) for value in given] if isinstance(given, list) else given
