"""Schema: what report.json and training.json hold, in `shapes`. All that reads one of them asks here, once, and nothing
behind it asks again; a report under way lacks parts, and may. A figure that is no number is null.

Bytes, milliseconds (`_ms`), seconds (`_s`, "seconds") and tokens a second (`tok_s`).
"""

from __future__ import annotations

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

NUMBER, POSITIVE = Number(), Number(least=1e-15)
SIZE, SHARE = Number(least=0), Number(0, 1)
WRITING = Text(1 << 20)  # what a model wrote, or was asked


def _summary(unit: Number) -> Rule:
    return Rule(
        {**dict.fromkeys(("median", "min", "max"), unit), "rounds": [unit]},
        lambda found: found["min"] <= found["median"] <= found["max"],
        "a summary whose median is not between its min and max",
    )


SUMMARY = _summary(POSITIVE)
HISTOGRAM = Rule(
    {"edges": [Number(-100, 100), 1001], "counts": [int, 1000]},  # edges: log10
    lambda found: len(found["edges"]) == len(found["counts"]) + 1 and all(a < b for a, b in pairwise(found["edges"])),
    "a histogram whose edges do not ascend, one more than there are counts",
)
BESIDE = {"log_ratio": NUMBER, "standard_error": Maybe(SIZE), "clear": Maybe(bool)}  # of perplexities, paired
DIVERGENCE = {
    **dict.fromkeys(("mean", "median", "p99", "max"), Maybe(SIZE)),
    **dict.fromkeys(("top1", "rms_dp"), Maybe(SHARE)),
    "rows": int,
    "standard_error": Maybe(SIZE),  # of a single window there is none
    "histogram": HISTOGRAM,
    "per_window": Maybe(
        {
            "begin": [int],
            "rows": [int],
            "kld": [SIZE],
            "top1": [SHARE],
            "reference_surprise": [NUMBER],
            "own_surprise": [NUMBER],
        }
    ),
}
MEMORY = {
    "weights_predicted": int,
    "kv_a_token": int,
    **dict.fromkeys(("weights_measured", "total_predicted", "baseline_rss", "loaded_rss"), Maybe(int)),
    **dict.fromkeys(("peak_rss", "peak_device"), Maybe(int)),
    "loading_took": Maybe(NUMBER),  # a difference
}
LATENCY = {
    "load_s": SUMMARY,
    "ttft_ms": SUMMARY,
    "ttft_tokens": int,
    "itl_ms": dict.fromkeys(("p50", "p90", "p99", "mean"), SUMMARY),
    "prefill": [{"tokens": int, "tok_s": SUMMARY, "ttft_ms": SUMMARY}, LENGTHS],
    "decode": [{"context": int, "tok_s": SUMMARY}, LENGTHS],
}
_STYLE = dict.fromkeys(("distinct_1", "distinct_2", "repetition"), Maybe(SHARE))
WRITTEN = {
    "first_divergence": SIZE,
    "first_divergences": [Maybe(int)],
    "identical": int,
    "equal_share": SHARE,
    **_STYLE,
    "reference": Maybe(_STYLE),
}
QUALITY = {
    "perplexity": Maybe(
        {
            "value": Maybe(Number(1e-15, 1e300)),
            "standard_error": Maybe(SIZE),
            "rows": int,
            "protocol": Maybe(str),
            "beside_original": Maybe(BESIDE),
            "per_window": Maybe({"begin": [int], "rows": [int], "surprise": [NUMBER]}),
        }
    ),
    "divergence": Maybe(DIVERGENCE),
    "noise_floor": Maybe({**DIVERGENCE, "how": str}),
    "texts": Maybe({"greedy": WRITTEN, "seeded": WRITTEN}),
}
METRIC = {
    "value": NUMBER,
    "better": ("higher", "lower"),
    "standard_error": Maybe(SIZE),
    "beside_original": Maybe({"difference": NUMBER, "standard_error": Maybe(SIZE)}),
}
TASK = {"chat": bool, "questions": int, "metrics": Named(METRIC, 16)}
WAY = {
    "seconds": SUMMARY,
    **dict.fromkeys(("peak_bytes", "weights_bytes"), Maybe(SIZE)),
    **dict.fromkeys(("kld", "kld_error", "noise_floor", "theory_s"), Maybe(SIZE)),
    **dict.fromkeys(("grew_by", "loading_took"), Maybe(NUMBER)),  # differences
    **dict.fromkeys(("kv_bytes", "theory_kv_peak", "kld_windows", "same_texts", "texts"), Maybe(int)),
    **dict.fromkeys(("prompt_tok_s", "decode_tok_s", "all_tok_s"), Maybe(SUMMARY)),
    "tok_s": Maybe(POSITIVE),
    "note": Maybe(str),
}
_MACHINE = {**dict.fromkeys(("cpu", "system", "python"), str), "cores": int, "memory_bytes": Maybe(SIZE)}
_MACHINE |= dict.fromkeys(("threads", "load"), Maybe(SIZE))
_HEAD = {"schema": int, **dict.fromkeys(("pronk", "made", "command"), str), "finished": bool, "steps": Named()}
PROVENANCE = Maybe(
    {"commit": Maybe(str), "versions": Named(Maybe(str)), "model_sha256": Named(str), "text_sha256": Maybe(str)}
)
REPORT = {
    **_HEAD,
    "missing": [str, _DRAWN],
    "model": {
        **dict.fromkeys(("name", "path", "format"), str),
        "quantization": Maybe(str),
        **dict.fromkeys(("parameters", "stored_bytes"), int),
        "config": Named(),
        "grid": Maybe({"bits": int, "share": SHARE, "stored": [str], "exact": bool, "formats": [str], "words": str}),
    },
    "machine": {**_MACHINE, "isa": Maybe(str)},
    "settings": {
        "rounds": int,
        "prefill": Maybe([int, LENGTHS]),  # what variants are compared on; techniques alone have lengths of their own
        "decode": Maybe({"contexts": [int, LENGTHS], "tokens": int}),
        "text": str,
        **dict.fromkeys(("text_tokens", "noise_windows"), Maybe(int)),
        "text_sha256": Maybe(str),
        **dict.fromkeys(("windows", "window_tokens"), int),
        **dict.fromkeys(("prompts", "new_tokens", "seed"), Maybe(int)),
        "reference": Maybe(str),
    },
    "variants": [
        {
            "name": str,
            "original": bool,
            "twin": Maybe(bool),
            "options": Named(most=_DRAWN),
            "dtype": Maybe(str),
            "memory": MEMORY,
            "latency": Maybe(LATENCY),
            "quality": QUALITY,
            "tasks": Maybe(Named(TASK, _DRAWN)),
        },
        16,
    ],
    "texts": [{"prompt": WRITING, "mode": str, "outputs": Named(WRITING, 16)}, 1000],
    "techniques": Maybe(
        Rule(
            [
                {
                    **dict.fromkeys(("name", "title", "what"), str),
                    "settings": Maybe(Named(most=_DRAWN)),
                    "points": [{"setting": str, "ways": Named(WAY)}, _DRAWN],
                },
                10,
            ],
            lambda found: sum(len(point["ways"]) for one in found for point in one["points"]) <= 128,
            "more than 128 ways, which pictures have no room for",
        )
    ),
    "provenance": PROVENANCE,
}
KINDS = ("parameters", "activations", "gradients", "optimizer")  # of memory
_TENSORS = dict.fromkeys((*KINDS, "logits"), int)
_POINT = {"name": str, "planned_bytes": Maybe(int)}
_MEASURED = {
    "seconds": SUMMARY,
    "tokens": POSITIVE,
    "tok_s": POSITIVE,
    "peak_bytes": _summary(SIZE),
    "trained_share": SHARE,
    "loss": dict.fromkeys(("first", "last"), Maybe(NUMBER)),
    **dict.fromkeys(("bytes", "at_peak"), Maybe(_TENSORS)),
    "flops": Maybe(SIZE),
}
TRAINING = {
    **_HEAD,
    "model": {"name": str},
    "machine": {**_MACHINE, **dict.fromkeys(("device", "torch"), Maybe(str))},
    "settings": {
        **dict.fromkeys(("model", "sha256"), str),
        **dict.fromkeys(("tokens", "rounds", "rank"), int),
        **dict.fromkeys(("data", "device"), Maybe(str)),
        "threads": Maybe(int),
    },
    "provenance": PROVENANCE,
    "lengths": Rule([int], bool, "an empty list"),
    "timed_steps": int,
    "points": [Either("out_of_memory", {**_POINT, "out_of_memory": str}, {**_POINT, **_MEASURED}), _DRAWN],
    "techniques": [
        {
            "name": str,
            "changes": Maybe(
                {
                    key: {"times": Maybe(SIZE), "arrow": ("↑", "↓", "=", "?")}
                    for key in (*KINDS, "peak", "compute", "time")
                }
            ),
        },
        _DRAWN,
    ],
}


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
