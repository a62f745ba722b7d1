"""What `pronk verify --mistakes` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pronk.cli import console

_SHOWN = 60  # characters of a text


def mistakes_as_text(result: Mapping[str, Any]) -> str:
    future = result["future"]
    return "\n".join(
        [
            f"{result['model']}: {result['engine']} engine in {result['dtype']} on {result['device']}; "
            f"the likeliest {result['new_tokens']} tokens after each prompt",
            *(_of_prompt(entry) for entry in result["prompts"]),
            "",
            "where: the first new token that is another one than it should be",
            f"future: in a text of {future['tokens']} tokens, another last token moves the logits before it by "
            f"{_moved(future['without_cache'])} without a cache; by {_moved(future['without_mask'])} without a mask",
        ]
    )


def _moved(by: float) -> str:
    return "nothing" if by == 0 else f"{by:.3g}"


def _of_prompt(entry: Mapping[str, Any]) -> str:
    prompt = entry["prompt"] if isinstance(entry["prompt"], str) else " ".join(map(str, entry["prompt"]))
    rows: list[tuple[object, ...]] = [("", "where", "text")]
    for way, found in entry["ways"].items():
        text = json.dumps(found["text"] or " ".join(map(str, found["tokens"])), ensure_ascii=False)
        cut = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        rows.append((way, found["parts_at"] or "nowhere", cut))
    return f"\n{json.dumps(prompt, ensure_ascii=False)}\n{console.table(rows, right=(1,))}"
