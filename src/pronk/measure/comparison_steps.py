"""Steps of a comparison: names under which its journal keeps them, what each costs, what a worker is asked in it, and
report.json, made of what they gave, be it all of them or a few.

Latency comes first, in interleaved rounds (A B C, then C B A): a machine that slows down slows all of them. Each
variant then has a process of its own, whose peak is its memory. Quality comes next, of one variant at a time: what the
reference predicts is kept in a file meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pronk.measure import latency, operations, recording, tasks, techniques, texts
from pronk.measure.comparison import ROTATION, Comparison, Variant, as_json
from pronk.measure.divergence import noise_floor
from pronk.measure.journal import Step
from pronk.measure.perplexity import beside, perplexity
from pronk.measure.worker import asks

Steps = Mapping[str, Any]
REFERENCE = "reference"  # what it predicts, read once
_WARM_UP = 8  # tokens decoded after each prompt before anything counts
_READ = 50_000  # tokens that the questions of one of pronk's own tasks have, about


# Of a way to judge a variant: in words before the variant's name, its cost, and what is applied to the model.
_Judge = tuple[str, float, Callable[..., Any], dict[str, Any]]


def step_name(kind: str, variant: Variant, number: int | None = None) -> str:
    return f"{kind} {variant.name}" if number is None else f"{kind} {variant.name} {number + 1}"


def steps(comparison: Comparison, kept: Path) -> list[Step]:
    """Every step, in order. `kept`: the file for what the reference predicts. Costs are in decoded tokens, about."""
    found: list[Step] = []
    if comparison.compares:
        found += _latency(comparison)
        found += _quality(comparison, comparison.reference, kept) if comparison.reference else []
        found += _tasks(comparison)
    return found + (techniques.steps(comparison) if comparison.request.techniques else [])


def _latency(comparison: Comparison) -> list[Step]:
    """Where not all fit into memory together, each measurement has a process of its own."""
    new, lengths = comparison.decode_tokens, comparison.prefill
    cost = sum(lengths) / 10 + len(lengths) * new
    warm_up = comparison.prompts(comparison.rounds), min(_WARM_UP, new)
    found = []
    for number in range(comparison.rounds):
        for variant in comparison.order(number):
            name = step_name("latency", variant, number)
            process = step_name("latency", variant) if comparison.together else name
            what = f"{variant.name}, round {number + 1} of {comparison.rounds}"
            how, prompts = comparison.loading(variant), comparison.prompts(number)
            measure = asks(operations.one_round, how=how, warm_up=warm_up, prompts=prompts, new=new)
            found.append(Step(name, what, cost, variant.name, process, measure))
    return found


def _quality(comparison: Comparison, reference: Variant, kept: Path) -> list[Step]:
    """One variant in memory at a time, each held against the file that the reference has left."""
    text: dict[str, Any] = {"ids": list(comparison.ids), "ctx": comparison.window, "count": comparison.windows}
    few, read = comparison.noise_windows, comparison.windows * comparison.window / 10
    record = asks(operations.applied, how=comparison.loading(reference), apply=recording.record, path=kept, **text)
    judges: dict[str, _Judge] = {
        "divergence": ("divergence of", read, recording.divergence_from, {**text, "path": kept}),
        "perplexity": ("perplexity of", read, perplexity, text),
        "noise": ("noise floor of", 2 * read * few / comparison.windows, noise_floor, {**text, "count": few}),
    }
    if new := comparison.new_tokens:  # both modes; six at once
        judges["texts"] = ("texts of", 4.0 * new, texts.write, {"new_tokens": new})
    what = f"predictions of {reference.name}, the reference"
    return [Step(REFERENCE, what, read, REFERENCE, REFERENCE, record), *_of_each(comparison, "quality", judges)]


def _tasks(comparison: Comparison) -> list[Step]:
    names = list(comparison.request.tasks or ())
    judge: _Judge = ("tasks,", len(names) * _READ / 10, tasks.evaluate, {"names": names})
    return _of_each(comparison, "tasks", {"tasks": judge}) if names else []


def _of_each(comparison: Comparison, process: str, judges: Mapping[str, _Judge]) -> list[Step]:
    """Of one variant after another, which may be a twin where it is judged."""
    found = []
    for variant in comparison.variants:
        how = comparison.loading(variant)._replace(rotate=ROTATION if variant.twin else None)
        for kind, (title, cost, function, asked) in judges.items():
            name, what = step_name(kind, variant), f"{title} {variant.name}"
            measure = asks(operations.applied, how=how, apply=function, **asked)
            found.append(Step(name, what, cost, variant.name, step_name(process, variant), measure))
    return found


# -- what they come to --


def composed(comparison: Comparison, about: Mapping[str, Any], taken: Steps) -> dict[str, Any]:
    """report.json, but for what every journal has: what the steps come to so far."""
    first: Mapping[str, Any] = next((one for one in taken.values() if "isa" in one), {})
    worker, origin = {key: first.get(key) for key in ("threads", "isa")}, about.get("provenance")
    variants = comparison.variants if comparison.compares else ()
    written = {v.name: taken[step_name("texts", v)] for v in comparison.variants if step_name("texts", v) in taken}
    report: dict[str, Any] = {
        "missing": [*comparison.missing, *techniques.missing(comparison)],
        "model": comparison.about_model(),
        "machine": {**about["machine"], **worker},
        "provenance": origin and {**origin, "machine": {**origin["machine"], **worker}},
        "settings": comparison.settings(),
        "variants": [_variant(comparison, variant, taken) for variant in variants],
        "texts": texts.side_by_side(texts.PROMPTS, written) if written else [],
    }
    if comparison.request.techniques:
        report["techniques"] = techniques.composed(comparison, taken)
    return report


def _variant(comparison: Comparison, variant: Variant, taken: Steps) -> dict[str, Any]:
    rounds = [taken[name] for n in range(comparison.rounds) if (name := step_name("latency", variant, n)) in taken]
    loaded = latency.summary(list(dict.fromkeys(one["load_s"] for one in rounds))) if rounds else None
    return {
        "name": variant.name,
        "original": variant.original,
        "twin": variant.twin,
        "options": {"engine": comparison.engine, **as_json(variant.options)},
        **{key: rounds[0][key] if rounds else None for key in ("dtype", "kv_dtype", "device")},
        "memory": _memory(comparison, variant, rounds),
        "latency": {"load_s": loaded, **latency.over_rounds(rounds)} if rounds else None,
        "quality": _quality_of(comparison, variant, taken),
        "tasks": _tasks_of(comparison, variant, taken),
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
        "total_predicted": None if before is None else variant.peak(before, tokens),
        **{key: max((one[key] for one in rounds if one[key] is not None), default=None)
           for key in ("peak_rss", "peak_device")},
    }  # fmt: skip


def _quality_of(comparison: Comparison, variant: Variant, taken: Steps) -> dict[str, Any]:
    kinds = {"perplexity": "perplexity", "divergence": "divergence", "noise": "noise_floor"}
    found = {key: taken[name] for kind, key in kinds.items() if (name := step_name(kind, variant)) in taken}
    original = comparison.original
    if variant is not original and "perplexity" in found and (base := taken.get(step_name("perplexity", original))):
        found["perplexity"] = {**found["perplexity"], "beside_original": beside(base, found["perplexity"])}
    theirs, own = taken.get(step_name("texts", original)), taken.get(step_name("texts", variant))
    if theirs and own:
        found["texts"] = {mode: texts.compared(theirs[mode], own[mode]) for mode in texts.MODES}
    return found


def _tasks_of(comparison: Comparison, variant: Variant, taken: Steps) -> dict[str, Any] | None:
    """Scores without those of single questions, which the steps keep; beside the original's, question by question."""
    if (own := taken.get(step_name("tasks", variant))) is None:
        return None
    base = {} if variant.original else taken.get(step_name("tasks", comparison.original), {})
    found = {}
    for task, of in own.items():
        theirs = base.get(task, {}).get("metrics", {})
        metrics = {}
        for name, metric in of["metrics"].items():
            beside_it = tasks.paired(theirs[name], metric) if name in theirs else None
            metrics[name] = {**metric, "scores": None, "beside_original": beside_it}
        found[task] = {**of, "metrics": metrics}
    return found
