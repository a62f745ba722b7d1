"""`--show-rollouts`: completions as the model writes them, and what each is worth."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pronk import terminal
from pronk.cli import console


def show(lines: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Of one step, as rollouts.jsonl has them."""
    from pronk.train.rollouts.page import by_prompt

    if as_json:
        console.write_json(list(lines))
        return
    step = lines[0]["step"]
    found = [f"step {step}" if step else "before training", ""]
    groups = by_prompt(lines)
    for asked, group in groups:
        found.append(_shown(asked))
        for line in group:
            each = " ".join(f"{name} {value:g}" for name, value in line["rewards"].items())
            cut = "" if line["ended"] else " (cut off)"
            found.append(f"  {_number(line['reward'])}  {_shown(line['completion'])}{cut}")
            if len(line["rewards"]) > 1:
                found.append(f"          {each}")
        found.append("")
    console.write("\n".join(found))
    if alike := sum(len({line["reward"] for line in group}) == 1 for _, group in groups):
        console.note(
            f"of {alike} of {len(groups)} prompts all completions are worth the same: nothing is learned from these"
        )


def _number(reward: float) -> str:
    return f"{reward:+.3f}" if abs(reward) < 1e6 else f"{reward:+g}"


def _shown(text: object) -> str:
    line = " ".join(str(text).split())
    return terminal.shown(line) if sys.stdout.isatty() else line
