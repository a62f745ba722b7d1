"""Compare: the original and its smaller variants on the same work, step by step, into report.json.

Latency comes first, in interleaved rounds (A B C, then C B A): a machine that slows down slows all of them. Each
variant then has a process of its own, whose peak is its memory. Quality comes next, of one variant at a time: the
reference's logits are kept on disk meanwhile. A step that is done is kept on disk and not done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk import __version__
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.measure import journal as journals
from pronk.measure import replay, techniques, texts
from pronk.measure.comparison import ROTATION, Comparison, Variant
from pronk.measure.composition import composed
from pronk.measure.journal import Journal
from pronk.measure.machine import load, machine, provenance
from pronk.measure.pace import Pace
from pronk.measure.request import Request, as_json
from pronk.measure.settling import settle
from pronk.measure.steps import REFERENCE, costs, step
from pronk.measure.worker import Worker
from pronk.system import processors

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress

_KEPT = ".reference.logits"  # what the reference predicts, while quality is measured
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
        about = {key: saved.get(key) for key in ("machine", "command", "provenance")}
        _check_same(comparison, saved, folder)
    else:
        journals.check_writable(folder, replace=overwrite)
        comparison = settle(request)
        origin = provenance(comparison.checkpoint, comparison.written, command)
        saved, about = {"steps": {}}, {"machine": origin["machine"], "command": command, "provenance": origin}
    _check_disk(comparison, folder)
    journal = Journal(folder, saved["steps"], lambda steps: composed(comparison, about, steps))
    journal.check()
    return comparison, journal


def compare(comparison: Comparison, journal: Journal, *, progress: Progress | None = None) -> dict[str, Any]:
    """Do what is not done yet; gives the report. `progress`: what is being done, and how much of all the work is.

    Whatever ends it early (an error, Ctrl-C) leaves on disk what was finished, to be gone on with.
    """
    todo = {name: cost for name, cost in costs(comparison).items() if name not in journal.steps}
    pace = Pace(todo, progress)
    if comparison.compares:
        _latency(comparison, journal, pace)
        if comparison.reference:
            _quality(comparison, comparison.reference, journal, pace)
        if comparison.request.tasks:
            _tasks(comparison, comparison.request.tasks, journal, pace)
    if comparison.request.techniques:
        techniques.measure(comparison, journal, pace)
    return journal.write()


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
                f"{comparison.reference.name}, which takes {comparison.kept_bytes / 1e6:,.0f} MB of disk meanwhile"
                + (f"; {settings['prompts']} prompts, greedy and sampled" if comparison.new_tokens else "")
            )
    if comparison.compares and comparison.request.tasks:
        lines.append(f"tasks: {', '.join(comparison.request.tasks)}")
    if comparison.grid:
        twins = [variant.name for variant in comparison.variants if variant.twin]
        of_twins = f": the quality of {', '.join(twins)} is measured on a rotated twin" if twins else ""
        lines.append(f"{comparison.model}: {comparison.grid}{of_twins}")
    if comparison.request.techniques:
        lines.append(f"techniques: {', '.join(techniques.titles(comparison))}")
    return lines + list(comparison.missing)


def warnings() -> list[str]:
    """What makes figures of this machine worth less, right now."""
    busy = load()
    if busy is None or busy <= 0.5:
        return []
    return [f"others are at work on this machine (load {busy:.1f} on {processors()} cores): its times will say little"]


# -- latency and memory --


def _latency(comparison: Comparison, journal: Journal, pace: Pace) -> None:
    rounds = [(number, variant) for number in range(comparison.rounds) for variant in comparison.order(number)]
    todo = [(number, variant) for number, variant in rounds if step("latency", variant, number) not in journal.steps]
    with ExitStack() as stack:
        ready: dict[str, Ready] = {}
        if comparison.together:
            for variant in {variant.name: variant for _, variant in todo}.values():
                ready[variant.name] = stack.enter_context(_started(comparison, variant, pace))
        for number, variant in todo:
            with ExitStack() as alone:
                worker, info = ready.get(variant.name) or alone.enter_context(_started(comparison, variant, pace))
                name = step("latency", variant, number)
                with pace.step(name, f"{variant.name}, round {number + 1} of {comparison.rounds}"):
                    prompts = comparison.prompts(number)
                    taken = worker.call("latency", name="own", prompts=prompts, new=comparison.decode_tokens)
                journal.record(name, {**info, **taken})


Ready = tuple[Worker, dict[str, Any]]


@contextmanager
def _started(comparison: Comparison, variant: Variant, pace: Pace) -> Iterator[Ready]:
    """A worker with the variant loaded and warm, and what it said of that."""
    with Worker(variant.name) as worker:
        pace.say(f"loading {variant.name}")
        info = worker.call("load", name="own", **_loading(comparison, variant))
        pace.say(f"warming up {variant.name}")
        prompts, new = comparison.prompts(comparison.rounds), min(_WARM_UP, comparison.decode_tokens)
        worker.call("latency", name="own", prompts=prompts, new=new)
        yield worker, info


# -- quality --


def _quality(comparison: Comparison, reference: Variant, journal: Journal, pace: Pace) -> None:
    """Everything that is missing of each variant, one in memory at a time.

    What the reference predicts is kept in a file until the last divergence from it is known.
    """
    kinds = ["divergence", "perplexity", "noise", *(["texts"] if comparison.new_tokens else [])]
    todo = [v for v in comparison.variants if any(step(kind, v) not in journal.steps for kind in kinds)]
    kept = journal.path.with_name(_KEPT)
    text: dict[str, Any] = {"ids": list(comparison.ids), "ctx": comparison.window}
    if any(step("divergence", variant) not in journal.steps for variant in todo) and not (
        REFERENCE in journal.steps and replay.is_recorded(kept)
    ):
        replay.forget(kept)  # of another comparison, perhaps
        with (
            pace.step(REFERENCE, f"predictions of {reference.name}, the reference") as advance,
            Worker(REFERENCE) as own,
        ):
            own.call("load", name="own", **_loading(comparison, reference))
            own.call("record", progress=advance, name="own", path=str(kept), count=comparison.windows, **text)
        journal.record(REFERENCE, {"options": as_json(reference.options), "bytes": kept.stat().st_size})
    for variant in todo:
        with Worker(variant.name) as judge:
            pace.say(f"loading {variant.name}")
            judge.call("load", name="own", **_judged(comparison, variant))
            calls: dict[str, dict[str, Any]] = {
                "divergence": {"path": str(kept), "count": comparison.windows, **text},
                "perplexity": {"count": comparison.windows, **text},
                "noise": {"count": comparison.settings()["noise_windows"], **text},
                "texts": {"prompts": list(texts.PROMPTS), "new_tokens": comparison.new_tokens, "seed": texts.SEED},
            }
            for kind in kinds:
                name = step(kind, variant)
                if name not in journal.steps:
                    with pace.step(name, f"{_TITLES.get(kind, kind)} of {variant.name}") as advance:
                        found = judge.call(_OPERATIONS.get(kind, kind), progress=advance, name="own", **calls[kind])
                    journal.record(name, found)
    replay.forget(kept)


_TITLES = {"noise": "noise floor"}
_OPERATIONS = {"noise": "noise_floor"}


def _tasks(comparison: Comparison, names: Sequence[str], journal: Journal, pace: Pace) -> None:
    for variant in comparison.variants:
        if (name := step("tasks", variant)) not in journal.steps:
            with pace.step(name, f"tasks, {variant.name}") as advance, Worker(variant.name) as worker:
                worker.call("load", name="own", **_judged(comparison, variant))
                journal.record(name, worker.call("tasks", progress=advance, name="own", tasks=list(names)))


def _judged(comparison: Comparison, variant: Variant) -> dict[str, Any]:
    """What is loaded where quality is measured."""
    return {**_loading(comparison, variant), "rotate": ROTATION if variant.twin else None}


def _loading(comparison: Comparison, variant: Variant) -> dict[str, Any]:
    return {"model": comparison.model, "engine": comparison.engine, "options": dict(variant.options)}


def _asked(saved: Mapping[str, Any], folder: Path) -> Request:
    try:
        return Request.of(saved["settings"]["asked"])
    except (KeyError, TypeError, ValueError):
        problem = f"does not say what was asked for; {journals.ANEW}"
        raise BadFile(folder / journals.NAME, problem, field="settings asked") from None


def _check_disk(comparison: Comparison, folder: Path) -> None:
    """Raises PronkError where what the reference predicts has no room."""
    need = comparison.kept_bytes if comparison.reference else 0
    kept = folder / _KEPT  # of a comparison that was interrupted: it is reused or replaced
    need -= min(need, kept.stat().st_size) if kept.is_file() else 0
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    if need > (free := shutil.disk_usage(there).free):
        raise PronkError(
            f"predictions of {comparison.model} take {need / 1e6:,.0f} MB of disk while variants are measured, and "
            f"{free / 1e6:,.0f} MB are free in {there}; take fewer --windows, or another folder (--out)"
        )


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
            raise BadRequest(f"{folder / journals.NAME} was begun {what}; {journals.ANEW}")
