"""report.json, made of what the steps of a comparison gave, be it all of them or a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from pronk import __version__
from pronk.measure import latency, memory, tasks, techniques, texts
from pronk.measure.comparison import Comparison, Variant, as_json
from pronk.measure.comparison_steps import step_name as step
from pronk.measure.comparison_steps import steps as every_step
from pronk.measure.perplexity import beside

Steps = Mapping[str, Any]


def composed(comparison: Comparison, about: Mapping[str, Any], steps: Steps) -> dict[str, Any]:
    """report.json, but for its steps: what they come to so far."""
    taken: Mapping[str, Any] = next((taken for taken in steps.values() if "isa" in taken), {})
    worker = {key: taken.get(key) for key in ("threads", "isa")}
    origin = about["provenance"]
    variants = comparison.variants if comparison.compares else ()
    written = {v.name: steps[step("texts", v)] for v in comparison.variants if step("texts", v) in steps}
    report: dict[str, Any] = {
        "pronk": __version__,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": about["command"],
        "finished": all(one.name in steps for one in every_step(comparison)),
        "missing": [*comparison.missing, *techniques.missing(comparison)],
        "model": comparison.about_model(),
        "machine": {**about["machine"], **worker},
        "provenance": origin and {**origin, "machine": {**origin["machine"], **worker}},
        "settings": comparison.settings(),
        "variants": [_variant(comparison, variant, steps) for variant in variants],
        "texts": texts.side_by_side(texts.PROMPTS, written) if written else [],
    }
    if comparison.request.techniques:
        report["techniques"] = techniques.composed(comparison, steps)
    return report


def _variant(comparison: Comparison, variant: Variant, steps: Steps) -> dict[str, Any]:
    rounds = [steps[name] for n in range(comparison.rounds) if (name := step("latency", variant, n)) in steps]
    loaded = latency.summary(list(dict.fromkeys(one["load_s"] for one in rounds))) if rounds else None
    return {
        "name": variant.name,
        "original": variant.original,
        "twin": variant.twin,
        "options": {"engine": comparison.engine, **as_json(variant.options)},
        **{key: rounds[0][key] if rounds else None for key in ("dtype", "kv_dtype", "device")},
        "memory": _memory(comparison, variant, rounds),
        "latency": {"load_s": loaded, **latency.over_rounds(rounds)} if rounds else None,
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
    tokens, first = comparison.prefill[-1] + comparison.decode_tokens + 1, rounds[0]
    on_gpu = first["loaded_device"] is not None
    before, after = (0, first["loaded_device"]) if on_gpu else (first["baseline"], first["loaded_rss"])
    return {
        **found,
        "weights_measured": first["weights_bytes"],
        "loading_took": None if None in (before, after) else after - before,
        "baseline_rss": first["baseline"],
        "loaded_rss": first["loaded_rss"],
        "total_predicted": None if before is None else memory.total(variant.predicted, before, tokens),
        **{key: max((one[key] for one in rounds if one[key] is not None), default=None)
           for key in ("peak_rss", "peak_device")},
    }  # fmt: skip


def _quality_of(comparison: Comparison, variant: Variant, steps: Steps) -> dict[str, Any]:
    kinds = {"perplexity": "perplexity", "divergence": "divergence", "noise": "noise_floor"}
    found = {key: steps[name] for kind, key in kinds.items() if (name := step(kind, variant)) in steps}
    original = _original(comparison)
    if variant is not original and "perplexity" in found and (base := steps.get(step("perplexity", original))):
        found["perplexity"] = {**found["perplexity"], "beside_original": beside(base, found["perplexity"])}
    theirs, own = steps.get(step("texts", original)), steps.get(step("texts", variant))
    if theirs and own:
        found["texts"] = {mode: texts.compared(theirs[mode], own[mode]) for mode in texts.MODES}
    return found


def _tasks_of(comparison: Comparison, variant: Variant, steps: Steps) -> dict[str, Any] | None:
    """Scores without those of single questions, which the steps keep; beside the original's, question by question."""
    if (own := steps.get(step("tasks", variant))) is None:
        return None
    base = {} if variant.original else steps.get(step("tasks", _original(comparison)), {})
    found = {}
    for task, of in own.items():
        theirs = base.get(task, {}).get("metrics", {})
        metrics = {}
        for name, metric in of["metrics"].items():
            beside_it = tasks.paired(theirs[name], metric) if name in theirs else None
            metrics[name] = {**metric, "scores": None, "beside_original": beside_it}
        found[task] = {**of, "metrics": metrics}
    return found


def _original(comparison: Comparison) -> Variant:
    return next(variant for variant in comparison.variants if variant.original)
