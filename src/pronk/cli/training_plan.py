"""What a run will take of memory, shown before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pronk.cli import console
from pronk.system import human_size

if TYPE_CHECKING:
    from pronk.train.memory import Plan
    from pronk.train.settings import Settings


def show(found: Plan, settings: Settings, *, as_json: bool) -> None:
    if as_json:
        console.write_json(found.to_dict())
    else:
        console.write(_as_text(found, settings) + "\n")


def _as_text(found: Plan, settings: Settings) -> str:
    rows: list[tuple[str, ...]] = [("", "maximum", "at the peak")]
    for kind, most in found.most.items():
        rows.append(
            ("optimizer state" if kind == "optimizer" else kind, human_size(most), human_size(found.at_peak[kind]))
        )
    besides = {"scratch, holes": found.scratch, "process, torch": found.process}
    rows += [(word, "", human_size(nbytes)) for word, nbytes in besides.items() if nbytes]
    rows.append(("total", "", human_size(found.total)))
    if found.free is not None:
        rows.append(("free", "", human_size(found.held + found.free)))
    answer = {True: "It fits.", False: "It does not fit.", None: "How much memory is free is unknown."}[found.fits]
    if found.total > found.in_a_step:
        answer += " The peak comes while weights are loaded."
    method = ("DoRA" if settings.lora.dora else "LoRA") if settings.lora else "all weights"
    return "\n".join(
        [
            console.table(rows, right=(1, 2)),
            "",
            f"{answer} Trained: {method}, {found.trained / found.weights:.2%} of {found.weights / 1e6:,.1f} million "
            f"parameters, {settings.precision} on {found.device}, {settings.optimizer}{_recomputed(settings)}.",
            *_reference(settings),
            f"The largest micro-batch has {found.tokens} tokens; a step takes {settings.accumulate} "
            f"micro-batch{'es' if settings.accumulate > 1 else ''}.",
        ]
    )


def _reference(settings: Settings) -> list[str]:
    """Of objectives on preferences, which may have one or none."""
    objective = settings.objective
    if objective.refers:
        return [
            "The reference is the model before training; a few numbers are kept of each example, and no copy of it."
        ]
    return [objective.without_reference] if objective.without_reference else []


def _recomputed(settings: Settings) -> str:
    if not settings.recompute:
        return ""
    every = "every block" if settings.recompute == 1 else f"one block in {settings.recompute}"
    return f", gradient checkpointing of {every}"
