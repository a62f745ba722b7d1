"""Texts side by side: what each shares with the original's from its beginning, and where it parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import commonprefix
from typing import NamedTuple

from pronk.measure.formatting import plain
from pronk.measure.report.tables import Own
from pronk.measure.report.variants import MODES

_WORD = re.compile(r"\s*\S*")


class Output(NamedTuple):
    """A generated text: what it shares with the original's, the first word that differs, and the rest."""

    name: str
    shared: str
    first: str
    rest: str


class Texts(NamedTuple):
    prompt: str
    mode: str
    outputs: list[Output]


def texts(report: Own, original: str) -> Iterator[Texts]:
    for entry in report.get("texts", ()):
        outputs = {plain(name): text for name, text in entry["outputs"].items()}
        base = outputs.get(original, next(iter(outputs.values()), ""))
        if outputs:
            parts = [Output(name, *split(base, text)) for name, text in outputs.items()]
            yield Texts(entry["prompt"], MODES.get(entry["mode"], entry["mode"]), parts)


def split(base: str, text: str) -> tuple[str, str, str]:
    """`text` as what it shares with `base` from its beginning, the first word that differs, and the rest."""
    at = len(commonprefix([base, text]))  # noqa: RUF071 -- of texts
    if at == len(text):
        return text, "", ""  # it ends before anything differs
    while at > 0 and not text[at - 1].isspace() and not text[at].isspace():
        at -= 1  # to the beginning of the word
    end = _WORD.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
    return text[:at], text[at:end], text[end:]
