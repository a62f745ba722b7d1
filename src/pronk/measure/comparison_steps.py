"""Steps of a comparison: names under which its journal keeps them, what each costs, and what a worker is asked in it.

Latency comes first, in interleaved rounds (A B C, then C B A): a machine that slows down slows all of them. Each
variant then has a process of its own, whose peak is its memory. Quality comes next, of one variant at a time: what the
reference predicts is kept in a file meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pronk.checkpoint.tensors import Progress
from pronk.measure import recording, techniques, texts
from pronk.measure.comparison import ROTATION, Comparison, Variant, as_json
from pronk.measure.divergence import noise_floor
from pronk.measure.perplexity import perplexity
from pronk.measure.runner import Step
from pronk.measure.tasks import evaluate
from pronk.measure.worker import Worker

REFERENCE = "reference"  # what it predicts, read once
_WARM_UP = 8  # tokens decoded after each prompt before anything counts
_READ = 50_000  # tokens that the questions of one of pronk's own tasks have, about


def step_name(kind: str, variant: Variant, number: int | None = None) -> str:
    return f"{kind} {variant.name}" if number is None else f"{kind} {variant.name} {number + 1}"


def steps(comparison: Comparison, kept: Path = Path()) -> list[Step]:
    """Every step, in order. `kept`: the file for what the reference predicts. Costs are in decoded tokens, about."""
    found: list[Step] = []
    if comparison.compares:
        found += _latency(comparison)
        found += _quality(comparison, comparison.reference, kept) if comparison.reference else []
        found += _tasks(comparison)
    return found + (techniques.steps(comparison) if comparison.request.techniques else [])


def _latency(comparison: Comparison) -> list[Step]:
    """Where not all fit into memory together, each measurement has a process of its own."""
    cost = sum(comparison.prefill) / 10 + len(comparison.prefill) * comparison.decode_tokens
    found = []
    for number in range(comparison.rounds):
        for variant in comparison.order(number):
            name = step_name("latency", variant, number)
            process = step_name("latency", variant) if comparison.together else name
            what = f"{variant.name}, round {number + 1} of {comparison.rounds}"
            found.append(Step(name, what, cost, variant.name, process, partial(_timed, comparison, variant, number)))
    return found


def _timed(comparison: Comparison, variant: Variant, number: int, worker: Worker, _: Progress) -> dict[str, Any]:
    warm_up = comparison.prompts(comparison.rounds), min(_WARM_UP, comparison.decode_tokens)
    info = worker.call("load", **_loading(comparison, variant), warm_up=warm_up)
    return {**info, **worker.call("latency", prompts=comparison.prompts(number), new=comparison.decode_tokens)}


def _quality(comparison: Comparison, reference: Variant, kept: Path) -> list[Step]:
    """One variant in memory at a time, each held against the file that the reference has left."""
    text: dict[str, Any] = {"ids": list(comparison.ids), "ctx": comparison.window, "count": comparison.windows}
    written = {"prompts": texts.PROMPTS, "new_tokens": comparison.new_tokens, "seed": texts.SEED}
    read = comparison.windows * comparison.window / 10
    kinds: list[tuple[str, str, float, Callable[..., Any], dict[str, Any]]] = [
        ("divergence", "divergence", read, recording.divergence_from, {**text, "path": kept}),
        ("perplexity", "perplexity", read, perplexity, text),
        ("noise", "noise floor", 2 * read * comparison.noise_windows / comparison.windows, noise_floor,
         {**text, "count": comparison.noise_windows}),
    ]  # fmt: skip
    if comparison.new_tokens:
        kinds.append(("texts", "texts", 4.0 * comparison.new_tokens, texts.write, written))  # both modes; six at once

    def record(worker: Worker, advance: Progress) -> dict[str, Any]:
        worker.call("load", **_loading(comparison, reference))
        worker.call("apply", function=recording.record, path=kept, **text, progress=advance)
        return {"options": as_json(reference.options), "bytes": kept.stat().st_size}

    what = f"predictions of {reference.name}, the reference"
    found = [Step(REFERENCE, what, read, REFERENCE, REFERENCE, record)]
    for variant in comparison.variants:
        for kind, title, cost, function, asked in kinds:
            measure = partial(_judged, comparison, variant, function, asked)
            name, process = step_name(kind, variant), step_name("quality", variant)
            found.append(Step(name, f"{title} of {variant.name}", cost, variant.name, process, measure))
    return found


def _tasks(comparison: Comparison) -> list[Step]:
    names, found = list(comparison.request.tasks or ()), []
    for variant in comparison.variants if names else ():
        measure = partial(_judged, comparison, variant, evaluate, {"names": names})
        name, cost = step_name("tasks", variant), len(names) * _READ / 10
        found.append(Step(name, f"tasks, {variant.name}", cost, variant.name, name, measure))
    return found


def _judged(
    comparison: Comparison,
    variant: Variant,
    function: Callable[..., Any],
    asked: dict[str, Any],
    worker: Worker,
    advance: Progress,
) -> Any:
    """Where quality is measured, the variant may be a twin."""
    worker.call("load", **_loading(comparison, variant), rotate=ROTATION if variant.twin else None)
    return worker.call("apply", function=function, **asked, progress=advance)


def _loading(comparison: Comparison, variant: Variant) -> dict[str, Any]:
    return {"model": comparison.model, "engine": comparison.engine, "options": dict(variant.options)}
