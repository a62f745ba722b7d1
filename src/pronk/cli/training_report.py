"""What a training run came to, in words: the report of its verb."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.cli import console
from pronk.system import human_size


def as_text(report: Mapping[str, Any]) -> str:
    """Of a Result's dict."""
    losses, held_out, examples = report["loss"], report["held_out_loss"], report["examples"]
    new = report.get("parameters")  # of a model that was made from nothing
    early = f", of {report['planned_steps']} planned" if report["steps"] < report["planned_steps"] else ""
    rows: list[tuple[str, ...]] = [
        ("trained", f"{new:,} parameters, {report['model']}" if new
         else f"{report['method']}, {report['trained_share']:.2%} of the parameters of {report['model']}"),
        ("examples", f"{examples['train']:,} sequences, and {examples['held_out']:,} held out" if new
         else f"{examples['train']}, and {examples['held_out']} held out"),
        ("steps", f"{report['steps']}{early}, {report['epochs']:.2f} epochs"),
        ("loss", _loss(losses, report["steps"])),
    ]  # fmt: skip
    if held_out:
        at = f"; kept: {held_out['kept']:.4f} of step {held_out['kept_step']}"
        rows.append(("held-out loss", f"{held_out['first']:.4f} at first, {held_out['last']:.4f} at last{at}"))
    if task := report.get("held_out_task"):
        rows.append(("task", f"{task['first']:.4f} at first, {task['last']:.4f} at last; kept: {task['kept']:.4f}"))
    if rewards := report.get("rewards"):
        ends = (_reward({word: found[end] for word, found in rewards.items()}) for end in ("first", "last"))
        rows.append(("rewards", f"{' and '.join(ends)}: means as of the loss"))
        if kept := report["held_out_rewards"]:
            rows.append(("held-out rewards", f"{_reward(kept)}, of step {held_out['kept_step']}"))
    if reward := report.get("reward"):
        rows.append(("reward", f"{reward['first']:.4f} and {reward['last']:.4f}: means of steps as of the loss"))
        if kept := report["held_out_reward"]:
            rows.append(("held-out reward", f"{kept['first']:.4f} at first; kept: {kept['kept']:.4f}"))
        rows.append(("mismatch", f"{report['mismatch']:.2g} nats a token (KL of what wrote from what was trained)"))
    rows += [
        ("time", f"{_seconds(report['seconds'])} of steps, {report['tokens_a_second']:.0f} tokens/s"),
        ("peak memory", human_size(report["peak_bytes"])),
        ("folder", report["out"] + (f", with {Path(report['curve']).name}" if report["curve"] else "")),
    ]
    if new:
        if report["bits_a_byte"] is not None:
            rows.append(("bits a byte", f"{report['bits_a_byte']:.3f}, of held-out text"))
        rows.append(("model", report["model_folder"]))
    lines = [console.table(rows)]
    for sample in report["samples"]:
        lines += ["", sample["prompt"].strip()]
        lines += [
            f"  {name:<8} {' '.join(said.split()) or '(nothing)'}" for name, said in sample.items() if name != "prompt"
        ]
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
    """Answers that stand alone have no margin."""
    right = f"{found['accuracy']:.0%} right"
    return f"margin {found['margin']:.3f} ({right})" if "margin" in found else right
