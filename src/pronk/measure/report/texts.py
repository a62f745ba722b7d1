"""Texts side by side: how soon they part from the original's, what they are like, and the texts themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pronk.measure.report import reading, words
from pronk.measure.report.document import Block, Cell, Output, Table, Texts
from pronk.measure.report.rows import Make, Rows, Variant, group, name_of, row

_WORD = re.compile(r"\s*\S*")
MODES = {"greedy": "greedy", "seeded": "sampled, the same random numbers for all"}


def texts(report: Mapping[str, Any], variants: Sequence[Variant], base: Variant | None) -> list[Block]:
    def own(mode: str, key: str, show: Callable[[float | None], str]) -> Make:
        """A figure of a variant's texts; the original's is told by those that are compared with it."""
        by_others = [reading.number(v, "quality", "texts", mode, "reference", key) for v in variants]
        known = next((number for number in by_others if number is not None), None)

        def cell(variant: Variant) -> Cell:
            if variant is base and key in ("first_divergence", "equal_share"):
                return Cell(words.NONE)  # it does not part from itself
            number = reading.number(variant, "quality", "texts", mode, key)
            apart = _spread(variant, mode) if key == "first_divergence" else ""
            return Cell.of(show(known if number is None and variant is base else number), apart)

        return cell

    rows: Rows = []
    for mode, title in MODES.items():
        rows += group(title.capitalize(), [
            *row("Tokens until they part (median)", variants, own(mode, "first_divergence", words.count)),
            *row("Places with the same token", variants, own(mode, "equal_share", words.percent)),
            *row("distinct-1", variants, own(mode, "distinct_1", words.digits)),
            *row("distinct-2", variants, own(mode, "distinct_2", words.digits)),
            *row("Repetition", variants, own(mode, "repetition", words.percent)),
        ])  # fmt: skip
    blocks: list[Block] = []
    if rows:
        caption = "Texts written to the same prompts, beside the original's"
        blocks.append(Table(caption, "Texts", [name_of(v) for v in variants], rows))
    against = name_of(base) if base else ""
    for entry in reading.entries(report, "texts"):
        if outputs := entry["outputs"]:
            mode = reading.text(entry, "mode")
            blocks.append(Texts(reading.text(entry, "prompt"), MODES.get(mode, mode), _outputs(outputs, against)))
    return blocks


def _spread(variant: Variant, mode: str) -> str:
    """Over the prompts, from the text that parts first to the one that parts last."""
    each = reading.at(variant, "quality", "texts", mode, "first_divergences") or []
    if not (known := [one for one in each if one is not None]):
        return ""
    return f"{min(known):g} to {'never' if None in each else format(max(known), 'g')}"


def _outputs(outputs: Mapping[str, str], original: str) -> list[Output]:
    texts = {words.plain(name): text for name, text in outputs.items()}
    base = texts.get(original, next(iter(texts.values()), ""))
    return [Output(name, *split(base, text)) for name, text in texts.items()]


def split(base: str, text: str) -> tuple[str, str, str]:
    """`text` as what it shares with `base` from its beginning, the first word that differs, and the rest."""
    if text == base:
        return text, "", ""
    at = next((n for n, (x, y) in enumerate(zip(base, text, strict=False)) if x != y), min(len(base), len(text)))
    if at == len(text):
        return text, "", ""  # it ends before anything differs
    while at > 0 and not text[at - 1].isspace() and not text[at].isspace():
        at -= 1  # to the beginning of the word
    end = _WORD.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
    return text[:at], text[at:end], text[end:]
