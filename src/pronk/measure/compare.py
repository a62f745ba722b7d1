"""Compare: the original and its smaller variants on the same work, step by step, into report.json.

Latency comes first, in interleaved rounds (A B C, then C B A): a machine that slows down slows all of them. Each
variant then has a process of its own, whose peak is its memory. Quality comes next, in one process that holds the
reference and as many variants beside it as fit. A step that is done is kept on disk and not done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk import __version__
from pronk.errors import BadFile, BadRequest
from pronk.measure import journal as journals
from pronk.measure import latency, techniques, texts
from pronk.measure.comparison import Comparison, Request, Variant, as_json, settle
from pronk.measure.journal import Journal
from pronk.measure.machine import cores, load, machine
from pronk.measure.pace import Note, Pace
from pronk.measure.worker import Worker

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress

_WARM_UP = 8  # tokens decoded after each prompt before anything counts


def begin(
    request: Request, folder: Path, *, resume: bool = False, overwrite: bool = False, command: str = ""
) -> tuple[Comparison, Journal]:
    """Settle what will be measured, and open its journal; with `resume`, that of a report which was begun before.

    Nothing is written yet. Raises BadRequest and other PronkErrors, for all that can be known now.
    """
    if resume:
        saved = journals.read(folder)
        comparison = settle(request.going_on_with(_asked(saved, folder)))
        about = {"machine": saved["machine"], "command": saved["command"]}
        _check_same(comparison, saved, folder)
    else:
        journals.check_writable(folder, replace=overwrite)
        comparison = settle(request)
        saved, about = {"steps": {}}, {"machine": machine(), "command": command}
    return comparison, Journal(folder, saved["steps"], lambda steps: composed(comparison, about, steps))


def compare(
    comparison: Comparison, journal: Journal, *, progress: Progress | None = None, note: Note = lambda line: None
) -> dict[str, Any]:
    """Do what is not done yet; gives the report. `progress`: what is being done, and how much of all the work is.

    Whatever ends it early (an error, Ctrl-C) leaves on disk what was finished, to be gone on with.
    """
    todo = {step: cost for step, cost in costs(comparison).items() if step not in journal.steps}
    pace = Pace(todo, progress, note)
    if comparison.compares:
        _latency(comparison, journal, pace)
        if comparison.reference:
            _quality(comparison, comparison.reference, journal, pace)
    if comparison.request.techniques:
        techniques.measure(comparison, journal, pace)
    journal.write()
    return journal.report()


def costs(comparison: Comparison) -> dict[str, float]:
    """Every step, in order, and how long it takes, about, in decoded tokens of the original."""
    found: dict[str, float] = {}
    if comparison.compares:
        a_round = _cost(sum(comparison.prefill), len(comparison.prefill) * comparison.decode_tokens)
        for number in range(comparison.rounds):
            found |= {_step("latency", variant, number): a_round for variant in comparison.order(number)}
    if comparison.compares and comparison.reference:
        read = _cost(comparison.windows * comparison.window)
        for variant in comparison.variants:
            found[_step("divergence", variant)] = 2 * read
            found[_step("perplexity", variant)] = read
            found[_step("noise", variant)] = _cost(2 * comparison.settings()["noise_windows"] * comparison.window)
            if comparison.new_tokens:
                found[_step("texts", variant)] = 2 * _cost(0, comparison.new_tokens) * 2  # both modes; six at once
    if comparison.request.techniques:
        found |= techniques.costs(comparison)
    return found


def about(comparison: Comparison) -> list[str]:
    """What will be measured, in lines for people."""
    variants, settings = [variant.name for variant in comparison.variants], comparison.settings()
    lines = []
    if comparison.compares:
        original, *others = variants
        lengths = ", ".join(map(str, comparison.prefill))
        rounds = "a single round" if comparison.rounds == 1 else f"{comparison.rounds} rounds in turns"
        lines += [
            f"{comparison.model}: {original} against {', '.join(others)}, on the {comparison.engine} engine",
            f"latency and memory: {rounds}, prompts of {lengths} tokens, {comparison.decode_tokens} new ones each"
            + ("" if comparison.together else "; one variant in memory at a time"),
        ]
        if comparison.reference:
            lines.append(
                f"quality: {comparison.windows} windows of {comparison.window} tokens of {comparison.text}, against "
                f"{comparison.reference.name}; {settings['prompts']} prompts, greedy and sampled"
            )
    if comparison.request.techniques:
        lines.append(f"techniques: {', '.join(techniques.titles(comparison))}")
    return lines + list(comparison.missing)


def warnings() -> list[str]:
    """What makes figures of this machine worth less, right now."""
    busy = load()
    if busy is None or busy <= 0.5:
        return []
    return [f"others are at work on this machine (load {busy:.1f} on {cores()} cores): its times will say little"]


# -- latency and memory --


def _latency(comparison: Comparison, journal: Journal, pace: Pace) -> None:
    rounds = [(number, variant) for number in range(comparison.rounds) for variant in comparison.order(number)]
    todo = [(number, variant) for number, variant in rounds if _step("latency", variant, number) not in journal.steps]
    with ExitStack() as stack:
        ready: dict[str, Ready] = {}
        if comparison.together:
            for variant in {variant.name: variant for _, variant in todo}.values():
                ready[variant.name] = stack.enter_context(_started(comparison, variant, pace))
        for number, variant in todo:
            with ExitStack() as alone:
                worker, info = ready.get(variant.name) or alone.enter_context(_started(comparison, variant, pace))
                step = _step("latency", variant, number)
                with pace.step(step, f"{variant.name}, round {number + 1} of {comparison.rounds}"):
                    prompts = comparison.prompts(number)
                    taken = worker.call("latency", name="own", prompts=prompts, new=comparison.decode_tokens)
                journal.record(step, {**info, **taken})


Ready = tuple[Worker, dict[str, Any]]


@contextmanager
def _started(comparison: Comparison, variant: Variant, pace: Pace) -> Iterator[Ready]:
    """A worker with the variant loaded and warm, and what it said of that."""
    with Worker(variant.name) as worker:
        pace.say(f"loading {variant.name}")
        info = worker.call("load", name="own", **_loading(comparison, variant))
        pace.say(f"warming up {variant.name}")
        prompts, new = comparison.prompts(comparison.rounds), min(_WARM_UP, comparison.decode_tokens)
        warm = worker.call("latency", name="own", prompts=prompts, new=new)
        seconds = sum(1e-3 * one["ttft_ms"] + new / one["decode_tok_s"] for one in warm["lengths"])
        pace.learn(seconds, _cost(sum(comparison.prefill), len(prompts) * new))
        yield worker, info


# -- quality --


def _quality(comparison: Comparison, reference: Variant, journal: Journal, pace: Pace) -> None:
    """Everything that is missing of each variant, in a process that holds the reference beside one or all of them."""
    kinds = ["divergence", "perplexity", "noise", *(["texts"] if comparison.new_tokens else [])]
    todo = [v for v in comparison.variants if any(_step(kind, v) not in journal.steps for kind in kinds)]
    if not todo:
        return
    # A variant that is the reference itself is not loaded a second time.
    own = next((variant.name for variant in todo if variant.options == reference.options), "reference")
    groups = [todo] if comparison.judged_together else [[variant] for variant in todo]
    with Worker("quality") as judge:
        pace.say(f"loading {reference.name}, the reference")
        judge.call("load", name=own, **_loading(comparison, reference))
        for group in groups:
            loaded = [variant for variant in group if variant.name != own]
            for variant in loaded:
                pace.say(f"loading {variant.name}")
                judge.call("load", name=variant.name, **_loading(comparison, variant))
            _judge(comparison, own, group, journal, pace, judge)
            for variant in loaded:
                judge.call("drop", name=variant.name)


def _judge(
    comparison: Comparison, reference: str, group: Sequence[Variant], journal: Journal, pace: Pace, judge: Worker
) -> None:
    text = {"ids": list(comparison.ids), "ctx": comparison.window}
    away = [variant for variant in group if _step("divergence", variant) not in journal.steps]
    if away:
        names = [variant.name for variant in away]
        steps = [_step("divergence", variant) for variant in away]
        with pace.step(steps, f"divergence of {', '.join(names)}") as advance:
            found = judge.call(
                "divergences", progress=advance, reference=reference, names=names, count=comparison.windows, **text
            )
        for variant in away:
            journal.record(_step("divergence", variant), found[variant.name])
    for variant in group:
        calls: dict[str, dict[str, Any]] = {
            "perplexity": {"count": comparison.windows, **text},
            "noise": {"count": comparison.settings()["noise_windows"], **text},
        }
        if comparison.new_tokens:
            calls["texts"] = {"prompts": list(texts.PROMPTS), "new_tokens": comparison.new_tokens, "seed": texts.SEED}
        for kind, arguments in calls.items():
            step = _step(kind, variant)
            if step not in journal.steps:
                with pace.step(step, f"{_TITLES[kind]} of {variant.name}") as advance:
                    found = judge.call(_OPERATIONS.get(kind, kind), progress=advance, name=variant.name, **arguments)
                journal.record(step, found)


_TITLES = {"perplexity": "perplexity", "noise": "noise floor", "texts": "texts"}
_OPERATIONS = {"noise": "noise_floor"}


# -- the report --


def composed(comparison: Comparison, about: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """report.json, but for its steps: what they come to so far."""
    variants = [_variant(comparison, variant, steps) for variant in comparison.variants] if comparison.compares else []
    loaded: Mapping[str, Any] = next((steps[step] for step in steps if step.startswith("latency ")), {})
    written = {v.name: steps[_step("texts", v)] for v in comparison.variants if _step("texts", v) in steps}
    report: dict[str, Any] = {
        "pronk": __version__,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": about["command"],
        "finished": all(step in steps for step in costs(comparison)),
        "missing": [*comparison.missing, *techniques.missing(comparison)],
        "model": comparison.about_model(),
        "machine": {**about["machine"], "threads": loaded.get("threads"), "isa": loaded.get("isa")},
        "settings": comparison.settings(),
        "variants": variants,
        "texts": texts.side_by_side(texts.PROMPTS, written) if written else [],
    }
    if comparison.request.techniques:
        report["techniques"] = techniques.composed(comparison, steps)
    return report


def _variant(comparison: Comparison, variant: Variant, steps: Mapping[str, Any]) -> dict[str, Any]:
    rounds = [
        steps[step] for n in range(comparison.rounds) if (step := _step("latency", variant, n)) in steps
    ]  # fmt: skip
    return {
        "name": variant.name,
        "original": variant.original,
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
    }


def _memory(comparison: Comparison, variant: Variant, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the process: predicted from what it held before loading, and what it held at its peak. On a GPU, of that."""
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
        "weights_measured": None if None in (before, after) else after - before,
        "baseline_rss": first["baseline"],
        "loaded_rss": first["loaded_rss"],
        "total_predicted": None if before is None else variant.predicted.total(before, tokens),
        "peak_rss": max(peaks, default=None),
        "peak_device": max(device, default=None),
    }


def _quality_of(comparison: Comparison, variant: Variant, steps: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, key in (("perplexity", "perplexity"), ("divergence", "divergence"), ("noise", "noise_floor")):
        if (step := _step(kind, variant)) in steps:
            found[key] = steps[step]
    original = next(one for one in comparison.variants if one.original)
    theirs, own = steps.get(_step("texts", original)), steps.get(_step("texts", variant))
    if theirs and own:
        found["texts"] = {mode: texts.compared(theirs[mode], own[mode]) for mode in texts.MODES}
    return found


def _loading(comparison: Comparison, variant: Variant) -> dict[str, Any]:
    return {"model": comparison.model, "engine": comparison.engine, "options": dict(variant.options)}


def _step(kind: str, variant: Variant, number: int | None = None) -> str:
    return f"{kind} {variant.name}" if number is None else f"{kind} {variant.name} {number + 1}"


def _cost(prefill: int, decode: int = 0) -> float:
    """Of so many tokens read and written, in tokens written: reading many at a time is some ten times as fast."""
    return prefill / 10 + decode


def _asked(saved: Mapping[str, Any], folder: Path) -> Request:
    try:
        return Request.of(saved["settings"]["asked"])
    except (KeyError, TypeError, ValueError):
        raise BadFile(folder / journals.NAME, "does not say what was asked for", field="settings asked") from None


def _check_same(comparison: Comparison, saved: Mapping[str, Any], folder: Path) -> None:
    """Raises BadRequest where what lies behind the same words is not the same any more."""
    here, there = machine(), saved["machine"]
    ours, theirs = comparison.settings(), saved["settings"]
    for what, now, then in (
        ("on another machine", [here[key] for key in ("cpu", "cores")], [there[key] for key in ("cpu", "cores")]),
        ("by another version of pronk", __version__, saved["pronk"]),
        ("with another text", ours["text_sha256"], theirs["text_sha256"]),
        ("with another model", comparison.about_model()["stored_bytes"], saved["model"]["stored_bytes"]),
        ("on another engine", ours["engine"], theirs["engine"]),
        ("with another reference", ours["reference"], theirs["reference"]),
        ("with other settings", {**ours, "asked": 0}, {**theirs, "asked": 0}),
    ):
        if now != then:
            raise BadRequest(
                f"{folder / journals.NAME} was begun {what}; begin anew (--overwrite), or elsewhere (--out)"
            )
