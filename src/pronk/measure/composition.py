"""Composition: report.json made of what the steps of a comparison gave, be it all of them or a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from pronk import __version__
from pronk.measure import latency, tasks, techniques, texts
from pronk.measure.comparison import Comparison, Variant, as_json
from pronk.measure.comparison_steps import step_name as step
from pronk.measure.comparison_steps import steps as every_step
from pronk.measure.perplexity import beside


def composed(comparison: Comparison, about: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """report.json, but for its steps: what they come to so far."""
    variants = [_variant(comparison, variant, steps) for variant in comparison.variants] if comparison.compares else []
    loaded: Mapping[str, Any] = next((taken for taken in steps.values() if "isa" in taken), {})
    written = {v.name: steps[step("texts", v)] for v in comparison.variants if step("texts", v) in steps}
    report: dict[str, Any] = {
        "pronk": __version__,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": about["command"],
        "finished": all(one.name in steps for one in every_step(comparison)),
        "missing": [*comparison.missing, *techniques.missing(comparison)],
        "model": comparison.about_model(),
        "machine": {**about["machine"], "threads": loaded.get("threads"), "isa": loaded.get("isa")},
        "provenance": _provenance(about["provenance"], loaded),
        "settings": comparison.settings(),
        "variants": variants,
        "texts": texts.side_by_side(texts.PROMPTS, written) if written else [],
    }
    if comparison.request.techniques:
        report["techniques"] = techniques.composed(comparison, steps)
    return report


def _provenance(origin: Mapping[str, Any] | None, loaded: Mapping[str, Any]) -> dict[str, Any] | None:
    """With what the workers said of threads and instruction set."""
    if origin is None:
        return None
    return {**origin, "machine": {**origin["machine"], **{key: loaded.get(key) for key in ("threads", "isa")}}}


def _variant(comparison: Comparison, variant: Variant, steps: Mapping[str, Any]) -> dict[str, Any]:
    rounds = [steps[name] for n in range(comparison.rounds) if (name := step("latency", variant, n)) in steps]
    return {
        "name": variant.name,
        "original": variant.original,
        "twin": variant.twin,
        "options": {"engine": comparison.engine, **as_json(variant.options)},
        "dtype": rounds[0]["dtype"] if rounds else None,
        "kv_dtype": rounds[0]["kv_dtype"] if rounds else None,
        "device": rounds[0]["device"] if rounds else None,
        "memory": _memory(comparison, variant, rounds),
        "latency": {
            "load_s": latency.summary(list(dict.fromkeys(one["load_s"] for one in rounds))),
            **latency.over_rounds(rounds),
        }
        if rounds
        else None,
        "quality": _quality_of(comparison, variant, steps),
        "tasks": _tasks_of(comparison, variant, steps),
    }


def _memory(comparison: Comparison, variant: Variant, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Weights, counted; and of the process what loading them took, what was predicted of it from what it held before,
    and what it held at its peak. On a GPU, of that."""
    found: dict[str, Any] = {
        "weights_predicted": variant.predicted.weights,
        "kv_a_token": variant.predicted.kv_a_token,
    }
    if not rounds:
        return found
    tokens = comparison.prefill[-1] + comparison.decode_tokens + 1
    first = rounds[0]
    on_gpu = first["loaded_device"] is not None
    before, after = (0, first["loaded_device"]) if on_gpu else (first["baseline"], first["loaded_rss"])
    peaks = [peak for one in rounds if (peak := one["peak_rss"]) is not None]
    device = [peak for one in rounds if (peak := one["peak_device"]) is not None]
    return {
        **found,
        "weights_measured": first["weights_bytes"],
        "loading_took": None if None in (before, after) else after - before,
        "baseline_rss": first["baseline"],
        "loaded_rss": first["loaded_rss"],
        "total_predicted": None if before is None else variant.predicted.total(before, tokens),
        "peak_rss": max(peaks, default=None),
        "peak_device": max(device, default=None),
    }


def _quality_of(comparison: Comparison, variant: Variant, steps: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, key in (("perplexity", "perplexity"), ("divergence", "divergence"), ("noise", "noise_floor")):
        if (name := step(kind, variant)) in steps:
            found[key] = steps[name]
    original = next(one for one in comparison.variants if one.original)
    if variant is not original and "perplexity" in found and (base := steps.get(step("perplexity", original))):
        found["perplexity"] = {**found["perplexity"], "beside_original": beside(base, found["perplexity"])}
    theirs, own = steps.get(step("texts", original)), steps.get(step("texts", variant))
    if theirs and own:
        found["texts"] = {mode: texts.compared(theirs[mode], own[mode]) for mode in texts.MODES}
    return found


def _tasks_of(comparison: Comparison, variant: Variant, steps: Mapping[str, Any]) -> dict[str, Any] | None:
    """Scores without those of single questions, which the steps keep; beside the original's, question by question."""
    if (own := steps.get(step("tasks", variant))) is None:
        return None
    base = steps.get(step("tasks", next(one for one in comparison.variants if one.original)), {})
    found = {}
    for task, of in own.items():
        metrics = {}
        for name, metric in of["metrics"].items():
            theirs = base.get(task, {}).get("metrics", {}).get(name)
            beside = None if variant.original or theirs is None else tasks.paired(theirs, metric)
            metrics[name] = {**metric, "scores": None, "beside_original": beside}
        found[task] = {**of, "metrics": metrics}
    return found
