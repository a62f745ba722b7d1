"""What `pronk verify --mistakes` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pronk.cli import console
from pronk.measure.formatting import digits

_SHOWN = 60  # characters of a text


def mistakes_as_text(result: Mapping[str, Any]) -> str:
    future = result["future"]
    moved = [digits(by) if (by := future[way]) else "nothing" for way in ("without_cache", "without_mask")]
    return "\n".join([
        f"{result['model']}: {result['engine']} engine in {result['dtype']} on {result['device']}; the likeliest "
        f"{result['new_tokens']} tokens after each prompt",
        *map(_of_prompt, result["prompts"]),
        "",
        "where: the first new token that differs from the correct text",
        f"future: in a text of {future['tokens']} tokens, changing the last token moves the logits before it by "
        f"{moved[0]} without a cache; by {moved[1]} without a mask",
    ])  # fmt: skip


def _of_prompt(entry: Mapping[str, Any]) -> str:
    rows = [("", "where", "text")]
    for way, found in entry["ways"].items():
        text = _quoted(found["text"] or found["tokens"])
        cut = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        rows.append((way, found["parts_at"] or "nowhere", cut))
    return f"\n{_quoted(entry['prompt'])}\n{console.table(rows, right=(1,))}"


def _quoted(said: str | list[int]) -> str:
    return json.dumps(said if isinstance(said, str) else " ".join(map(str, said)), ensure_ascii=False)
