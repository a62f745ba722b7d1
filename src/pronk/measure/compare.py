"""Compare: the original and its smaller variants on the same work, step by step, into report.json."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, PronkError
from pronk.measure import journal as journals
from pronk.measure import techniques
from pronk.measure.comparison import Comparison, Request
from pronk.measure.comparison_steps import REFERENCE, composed, step_name, steps
from pronk.measure.journal import Journal
from pronk.measure.machine import load, provenance
from pronk.measure.settle import settle
from pronk.system import human_size, processors

_KEPT = ".reference.logits"  # what the reference predicts, while quality is measured


def begin(
    request: Request, folder: Path, *, resume: bool = False, overwrite: bool = False, command: str = ""
) -> tuple[Comparison, Journal]:
    """Settle what will be measured, and open its journal; with `resume`, that of a report which was begun before.

    Nothing is written yet. Raises BadRequest and other PronkErrors, for all that can be known now.
    """
    path = folder / journals.NAME
    saved = journals.opened(path, resume=resume, overwrite=overwrite)
    comparison = settle(request.going_on_with(_asked(saved, path)) if saved else request)
    origin = provenance(comparison.checkpoint, comparison.written, command)
    if saved:
        _check_same(comparison, origin, saved, path)
    _check_disk(comparison, folder)
    every = steps(comparison, folder / _KEPT)
    return comparison, Journal(path, every, partial(composed, comparison), origin, saved)


def compare(comparison: Comparison, journal: Journal, *, progress: Progress | None = None) -> dict[str, Any]:
    """Do what is not done yet; gives the report. `progress`: what is being done, and how much of all the work is.

    Whatever ends it early (an error, Ctrl-C) leaves on disk what was finished, to be gone on with.
    """
    kept = journal.path.with_name(_KEPT)
    judged = all(step_name("divergence", variant) in journal.steps for variant in comparison.variants)
    whole = kept.is_file() and kept.stat().st_size == comparison.kept_bytes
    if not judged and not (REFERENCE in journal.steps and whole):
        journal.steps.pop(REFERENCE, None)
        kept.unlink(missing_ok=True)  # of another comparison, perhaps
    report = journal.run(progress)
    kept.unlink(missing_ok=True)
    return report


def about(comparison: Comparison) -> list[str]:
    """What will be measured, in lines for people."""
    variants, lines = [variant.name for variant in comparison.variants], []
    if comparison.compares:
        lengths = ", ".join(map(str, comparison.prefill))
        rounds = "a single round" if comparison.rounds == 1 else f"{comparison.rounds} rounds in turns"
        lines += [
            f"{comparison.model}: {variants[0]} against {', '.join(variants[1:])}, on the {comparison.engine} engine",
            f"latency and memory: {rounds}, prompts of {lengths} tokens, {comparison.decode_tokens} new ones each"
            + ("" if comparison.together else "; one variant in memory at a time"),
        ]
        if comparison.reference:
            prompts = comparison.settings()["prompts"]
            lines.append(
                f"quality: {comparison.windows} windows of {comparison.window} tokens of {comparison.text}, against "
                f"{comparison.reference.name}, which takes {human_size(comparison.kept_bytes)} of disk meanwhile"
                + (f"; {prompts} prompts, greedy and sampled" if comparison.new_tokens else "")
            )
        if comparison.request.tasks:
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


def _asked(saved: Mapping[str, Any], path: Path) -> Request:
    try:
        return Request.of(saved["settings"]["asked"])
    except (KeyError, TypeError, ValueError, AttributeError):
        problem = f"does not say what was asked for; {journals.ANEW}"
        raise BadFile(path, problem, field="settings asked") from None


def _check_disk(comparison: Comparison, folder: Path) -> None:
    """Raises PronkError where what the reference predicts has no room."""
    need = comparison.kept_bytes if comparison.reference else 0
    kept = folder / _KEPT  # of a comparison that was interrupted: it is reused or replaced
    need -= min(need, kept.stat().st_size) if kept.is_file() else 0
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    if need > (free := shutil.disk_usage(there).free):
        raise PronkError(
            f"predictions of {comparison.model} take {human_size(need)} of disk while variants are measured, and "
            f"{human_size(free)} are free in {there}; take fewer --windows, or another folder (--out)"
        )


def _check_same(comparison: Comparison, origin: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """Raises BadRequest where what lies behind the same words is not the same any more. Of the model, its digest: what
    the reference predicted may be on disk still.
    """
    ours, theirs = comparison.settings(), saved["settings"]
    here, there = origin["machine"], saved["machine"]
    journals.check_same(path, origin, saved, [
        ("on another machine", [here["cpu"], here["cores"]], [there["cpu"], there["cores"]]),
        ("with another text", ours["text_sha256"], theirs["text_sha256"]),
        ("on another engine", ours["engine"], theirs["engine"]),
        ("with another reference", ours["reference"], theirs["reference"]),
        ("with other settings", {**ours, "asked": 0}, {**theirs, "asked": 0}),
    ])  # fmt: skip
