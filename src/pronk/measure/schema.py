"""Schema: what report.json holds. `problems` says where a report differs; a report under way lacks parts, and may.

Written as Python values: a type; a list of what a list holds; a dict of what an object has, which may have more; a dict
of one type and a shape where keys are names. `Maybe`: absent or null as well. Bytes, milliseconds (`_ms`), seconds
(`_s`, "seconds") and tokens a second (`tok_s`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NUMBER = (int, float)


@dataclass(frozen=True)
class Maybe:
    shape: Any


@dataclass(frozen=True)
class Named:
    """An object whose keys are names, of variants, say."""

    shape: Any


SUMMARY = {"median": NUMBER, "min": NUMBER, "max": NUMBER, "rounds": [NUMBER]}
BESIDE = {"log_ratio": NUMBER, "standard_error": Maybe(NUMBER), "clear": Maybe(bool)}  # of perplexities, paired
DIVERGENCE = {
    **dict.fromkeys(("mean", "median", "p99", "max", "top1", "rms_dp", "rows"), NUMBER),
    "standard_error": Maybe(NUMBER),  # of a single window there is none
    "histogram": {"edges": [NUMBER], "counts": [NUMBER]},
    "per_window": Maybe(
        {
            "begin": [int],
            "rows": [int],
            "kld": [NUMBER],
            "top1": [NUMBER],
            "reference_surprise": [NUMBER],
            "own_surprise": [NUMBER],
        }
    ),
}
MEMORY = {
    "weights_predicted": int,
    "kv_a_token": int,
    **dict.fromkeys(("weights_measured", "loading_took", "total_predicted", "baseline_rss", "loaded_rss"), Maybe(int)),
    **dict.fromkeys(("peak_rss", "peak_device"), Maybe(int)),
}
LATENCY = {
    "load_s": SUMMARY,
    "ttft_ms": SUMMARY,
    "ttft_tokens": int,
    "itl_ms": dict.fromkeys(("p50", "p90", "p99", "mean"), SUMMARY),
    "prefill": [{"tokens": int, "tok_s": SUMMARY, "ttft_ms": SUMMARY}],
    "decode": [{"context": int, "tok_s": SUMMARY}],
}
WRITTEN = {
    "first_divergence": NUMBER,
    "first_divergences": [Maybe(int)],
    "identical": int,
    "equal_share": NUMBER,
    **dict.fromkeys(("distinct_1", "distinct_2", "repetition"), Maybe(NUMBER)),
}
QUALITY = {
    "perplexity": Maybe(
        {
            "value": NUMBER,
            "standard_error": Maybe(NUMBER),
            "rows": int,
            "beside_original": Maybe(BESIDE),
            "per_window": Maybe({"begin": [int], "rows": [int], "surprise": [NUMBER]}),
        }
    ),
    "divergence": Maybe(DIVERGENCE),
    "noise_floor": Maybe({**DIVERGENCE, "how": str}),
    "texts": Maybe({"greedy": WRITTEN, "seeded": WRITTEN}),
}
WAY = {
    "seconds": SUMMARY,
    **dict.fromkeys(("prompt_tok_s", "decode_tok_s", "all_tok_s"), Maybe(SUMMARY)),
    **dict.fromkeys(("tok_s", "peak_bytes", "weights_bytes", "loading_took"), Maybe(NUMBER)),
    **dict.fromkeys(("kld", "kld_error", "noise_floor", "theory_s"), Maybe(NUMBER)),
    **dict.fromkeys(("grew_by", "kv_bytes", "theory_kv_peak"), Maybe(int)),
    **dict.fromkeys(("kld_windows", "same_texts", "texts"), Maybe(int)),
    "note": Maybe(str),
}
REPORT = {
    "schema": int,
    **dict.fromkeys(("pronk", "made", "command"), str),
    "finished": bool,
    "missing": [str],
    "model": {"name": str, "path": str, "format": str, "parameters": int, "stored_bytes": int, "config": Named(object)},
    "machine": {
        **dict.fromkeys(("cpu", "system", "python"), str),
        "cores": int,
        **dict.fromkeys(("threads", "memory_bytes", "load"), Maybe(NUMBER)),
        "isa": Maybe(str),
    },
    "settings": {
        "rounds": int,
        "prefill": Maybe([int]),  # what variants are compared on; techniques alone have lengths of their own
        "decode": Maybe({"contexts": [int], "tokens": int}),
        "text": str,
        **dict.fromkeys(("windows", "window_tokens"), int),
        **dict.fromkeys(("prompts", "new_tokens", "seed"), Maybe(int)),
        "reference": Maybe(str),
    },
    "variants": [
        {
            "name": str,
            "original": bool,
            "options": Named(object),
            "dtype": Maybe(str),
            "memory": MEMORY,
            "latency": Maybe(LATENCY),
            "quality": QUALITY,
        }
    ],
    "texts": [{"prompt": str, "mode": str, "outputs": Named(str)}],
    "techniques": Maybe(
        [{"name": str, "title": str, "what": str, "points": [{"setting": str, "ways": Named(WAY)}]}],
    ),
    "steps": Named(object),
    "provenance": Maybe(
        {
            "commit": Maybe(str),
            "versions": Named(Maybe(str)),
            "model_sha256": Named(str),
            "text_sha256": Maybe(str),
        }
    ),
}


def problems(report: Any, shape: Any = REPORT, where: str = "report") -> Iterator[str]:
    """Every place where `report` is not as `shape` has it, in words; none of a sound one."""
    if isinstance(shape, Maybe):
        if report is not None:
            yield from problems(report, shape.shape, where)
    elif isinstance(shape, Named):
        if not isinstance(report, dict):
            yield f"{where} is {_kind(report)} and no object"
        elif shape.shape is not object:
            for name, value in report.items():
                yield from problems(value, shape.shape, f"{where}[{name!r}]")
    elif isinstance(shape, list):
        if not isinstance(report, list):
            yield f"{where} is {_kind(report)} and no list"
        else:
            for n, value in enumerate(report):
                yield from problems(value, shape[0], f"{where}[{n}]")
    elif isinstance(shape, dict):
        if not isinstance(report, dict):
            yield f"{where} is {_kind(report)} and no object"
        else:
            for name, inner in shape.items():
                if name in report or not isinstance(inner, Maybe):
                    yield from problems(report.get(name), inner, f"{where}.{name}")
    elif not isinstance(report, shape) or (isinstance(report, bool) and shape is not bool):
        yield f"{where} is {_kind(report)}"


def _kind(value: Any) -> str:
    return "null or absent" if value is None else f"a {type(value).__name__}"
