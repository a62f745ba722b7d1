"""What a training run came to: the report of its verb, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.cli import console
from pronk.cli.training_progress import peak_bytes
from pronk.errors import PronkError

if TYPE_CHECKING:
    from pronk.train.trainer import Trainer

_STEPS = 10  # whose losses are told as one: each is of few examples


def of(run: Trainer) -> dict[str, Any]:
    from pronk.train.folder import METRICS, read_metrics

    metrics = read_metrics(run.folder)
    steps = [line for line in metrics if "loss" in line]
    try:
        return _of(run, metrics, steps)
    except (LookupError, TypeError, ZeroDivisionError):  # lines that lack numbers, or none at all
        problem = "is gone or damaged: what was trained is there, and no report of it"
        raise PronkError(f"{run.folder / METRICS} {problem}") from None


def _of(run: Trainer, metrics: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from pronk.train.curve import CURVE, draw

    held_out = [line for line in metrics if "held_out_loss" in line]
    kept = min(held_out[1:], key=lambda line: line["held_out_loss"], default=None)
    seconds, tokens = (sum(line[name] for line in steps) for name in ("seconds", "tokens"))
    some = max(1, min(_STEPS, len(steps) // 2))  # so that the first are not the last
    curve = None
    try:
        curve = draw(run.folder)
    except OSError as error:  # what was trained is there, and so is all that the curve is drawn from
        console.note(f"{run.folder / CURVE} cannot be drawn: {error.strerror or error}")
    return {
        "model": run.settings.model,
        "out": str(run.folder),
        "method": "LoRA" if run.settings.lora else "full",
        "trained_share": run.trained_share,
        "examples": {"train": len(run.data.train), "held_out": len(run.data.held_out)},
        "steps": len(steps),
        "planned_steps": run.loop.schedule.steps,
        "epochs": steps[-1]["epoch"],
        "loss": {**_ends(steps, "loss", some), "steps": some},
        "held_out_loss": {
            "first": held_out[0]["held_out_loss"],
            "last": held_out[-1]["held_out_loss"],
            "kept": kept["held_out_loss"],
            "kept_step": kept["step"],
        } if kept else None,
        **(_rewards(steps, kept, some) if "rewards/margins" in steps[0] else {}),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_a_second": tokens / seconds,
        "peak_bytes": peak_bytes(run),
        "curve": str(curve) if curve else None,
    }  # fmt: skip


def _ends(steps: Sequence[Mapping[str, float]], name: str, some: int) -> dict[str, float]:
    """Means of the first and of the last so many steps."""
    values = [line[name] for line in steps]
    return {"first": sum(values[:some]) / some, "last": sum(values[-some:]) / some}


def _rewards(steps: Sequence[Mapping[str, float]], kept: Mapping[str, float] | None, some: int) -> dict[str, Any]:
    names = {"margin": "rewards/margins", "accuracy": "rewards/accuracies"}
    return {
        "rewards": {word: _ends(steps, name, some) for word, name in names.items()},
        "held_out_rewards": {word: kept[f"held_out_{name}"] for word, name in names.items()} if kept else None,
    }


def as_text(report: dict[str, Any], more: Mapping[str, str] | None = None) -> str:
    """`more`: rows to add, or to put in the place of others."""
    losses, held_out, examples = report["loss"], report["held_out_loss"], report["examples"]
    early = f", of {report['planned_steps']} planned" if report["steps"] < report["planned_steps"] else ""
    rows = [
        ("trained", f"{report['method']}, {report['trained_share']:.2%} of the parameters of {report['model']}"),
        ("examples", f"{examples['train']}, and {examples['held_out']} held out"),
        ("steps", f"{report['steps']}{early}, {report['epochs']:.2f} epochs"),
        ("loss", _loss(losses, report["steps"])),
    ]
    if held_out:
        at = f"; kept: {held_out['kept']:.4f} of step {held_out['kept_step']}"
        rows.append(("held-out loss", f"{held_out['first']:.4f} at first, {held_out['last']:.4f} at last{at}"))
    if rewards := report.get("rewards"):
        ends = (_reward({word: found[end] for word, found in rewards.items()}) for end in ("first", "last"))
        rows.append(("rewards", " and ".join(ends)))
        if kept := report["held_out_rewards"]:
            rows.append(("held-out rewards", f"{_reward(kept)}, of step {held_out['kept_step']}"))
    rows += [
        ("time", f"{_seconds(report['seconds'])} of steps, {report['tokens_a_second']:.0f} tokens/s"),
        ("peak memory", console.size(report["peak_bytes"])),
        ("folder", report["out"] + (f", with {Path(report['curve']).name}" if report["curve"] else "")),
    ]
    lines = [console.table([*(dict(rows) | dict(more or {})).items()])]
    for sample in report["samples"]:
        lines += ["", sample["prompt"].strip()]
        lines += [f"  {name:<8} {' '.join(said.split())}" for name, said in sample.items() if name != "prompt"]
    return "\n".join(lines)


def _loss(losses: Mapping[str, float], steps: int) -> str:
    """In words that are true of a run of one step as well."""
    if steps == 1:
        return f"{losses['first']:.4f}, of the only step"
    some = losses["steps"]
    of = f": means of the first and last {some} steps" if some > 1 else ", of the first and the last step"
    return f"{losses['first']:.4f} and {losses['last']:.4f}{of}"


def _seconds(seconds: float) -> str:
    """Two digits at least: 0.042 s, 4.2 s, 302 s."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _reward(found: Mapping[str, float]) -> str:
    return f"margin {found['margin']:.3f} ({found['accuracy']:.0%} right)"
